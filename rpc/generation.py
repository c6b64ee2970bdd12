"""The two methods that generate, and how a generation's events and end become notifications and an answer.

On the event loop. Knows the wire and `engine.api.Generation`, and no engine.
"""

from __future__ import annotations

from collections.abc import Awaitable

from omlxd.engine.api import Cancelled, GenerateRequest, GenerationResult
from omlxd.rpc.calls import Call
from omlxd.rpc.errors import ErrorBody, of_cancelled
from omlxd.rpc.params import ChatParams, CompleteParams, GenerateParams
from omlxd.rpc.progress import Notifier
from omlxd.rpc.wire import Extras, Generated, generated


def chat(call: Call, params: ChatParams) -> Awaitable[Generated | ErrorBody]:
    return _generate(call, params, params.request(params.prompt()))


def complete(call: Call, params: CompleteParams) -> Awaitable[Generated | ErrorBody]:
    return _generate(call, params, params.request(params.as_prompt()))


async def _generate(call: Call, params: GenerateParams, request: GenerateRequest) -> Generated | ErrorBody:
    extras = Extras(token_ids=bool(params.return_token_ids), logprobs=request.logprobs > 0)
    try:
        return generated(await run(call, request, extras), extras)
    except Cancelled as cancelled:
        partial = None if cancelled.partial is None else generated(cancelled.partial, extras)
        return of_cancelled(cancelled, partial)


async def run(call: Call, request: GenerateRequest, extras: Extras) -> GenerationResult:
    """Starts the generation and sees it through; whatever ends the call ends the generation too."""
    generation = call.backend.generate(request)

    async def follow() -> GenerationResult:
        if request.stream or request.progress:
            await Notifier(call, extras).forward(generation)
        return await generation.result()

    try:
        return await call.wait_for(follow, stop=generation.cancel)
    finally:
        generation.cancel("the connection was closed")  # of no effect once it has ended
