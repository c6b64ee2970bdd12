"""The methods about the prefix cache. On the event loop; `cache.warm` is a generation that generates nothing."""

from __future__ import annotations

from collections.abc import Sequence

from omlxd.engine.api import CacheLine, CacheVerified, Cancelled, GenerateRequest, GenerationResult, Stopping
from omlxd.rpc import params as p
from omlxd.rpc import wire
from omlxd.rpc.calls import Call
from omlxd.rpc.errors import ErrorBody, of_cancelled
from omlxd.rpc.generation import run
from omlxd.rpc.wire import Extras

DEFAULT_NODES = 100


async def stats(call: Call, params: p.CacheStatsParams) -> Sequence[CacheLine]:
    return await call.wait_for(lambda: call.backend.cache_stats(params.model))


async def explain(call: Call, params: p.CachePromptParams) -> wire.Explained:
    prompt = params.as_prompt()
    return wire.explained(await call.wait_for(lambda: call.backend.explain_cache(params.model, prompt)))


async def inspect(call: Call, params: p.CacheInspectParams) -> wire.Inspected:
    limit = params.limit or DEFAULT_NODES
    nodes = await call.wait_for(lambda: call.backend.inspect_cache(params.model, limit, params.session))
    return wire.Inspected([wire.node(each) for each in nodes])


async def verify(call: Call, params: p.SessionsParams) -> CacheVerified:
    return await call.wait_for(lambda: call.backend.verify_cache(params.model))


async def clear(call: Call, params: p.CacheClearParams) -> wire.Cleared:
    tier = params.tier or "all"
    return wire.Cleared(await call.wait_for(lambda: call.backend.clear_cache(params.model, tier)))


async def warm(call: Call, params: p.CacheWarmParams) -> wire.Warmed | ErrorBody:
    request = GenerateRequest(
        model=params.model,
        prompt=params.as_prompt(),
        stopping=Stopping(max_tokens=1),
        progress=bool(params.stream) or params.workDoneToken is not None,
        warm=True,
    )
    try:
        return _warmed(await run(call, request, Extras()))
    except Cancelled as cancelled:
        return of_cancelled(cancelled, None if cancelled.partial is None else _warmed(cancelled.partial))


def _warmed(result: GenerationResult) -> wire.Warmed:
    return wire.Warmed(result.usage.prompt_tokens, result.usage.cached_tokens)
