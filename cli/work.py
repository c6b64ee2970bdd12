"""One long request on behalf of a command: its progress on the terminal, its deltas to whoever shows them, Ctrl-C.

Owns nothing between calls. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omlxd.cli.console import Console
from omlxd.cli.errors import CANCELLED_CODE, Interrupted
from omlxd.cli.interrupt import CancelOnInterrupt
from omlxd.cli.tables import size
from omlxd.rpc.client import Client, RpcError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Take = Callable[[dict[str, Any]], None]

_PROGRESS_TOKEN = "progress"
_IN_BYTES = {"download", "load"}
_WORDS = {"download": "downloading", "load": "loading", "fetch": "reading the cache", "prefill": "reading the prompt"}


def perform(
    client: Client,
    method: str,
    params: Mapping[str, Any],
    console: Console,
    *,
    show: Take | None = None,
    with_progress: bool = True,
) -> Any:
    """The result of a request that may take long; `show` is given its deltas, and without it none are asked for.

    `with_progress` is for methods that report it; the others refuse the parameter. Raises as `interruptible` does.
    """
    wanted: dict[str, Any] = {"stream": True} if show is not None else {}
    if show is None and with_progress:
        wanted = {"workDoneToken": _PROGRESS_TOKEN}

    def take(value: dict[str, Any]) -> None:
        if value["kind"] == "progress":
            console.progress(describe(value))
        elif show is not None:
            show(value)

    try:
        return interruptible(client, method, {**params, **wanted}, take)
    finally:
        console.clear_progress()


def interruptible(client: Client, method: str, params: Any, take: Take) -> Any:
    """The result of a request that Ctrl-C cancels; `take` is given the values of its `$/progress`.

    Raises RpcError, DaemonUnreachable; Interrupted after Ctrl-C, once the daemon has said that it stopped.
    """
    with CancelOnInterrupt() as interrupt:
        try:
            call = interrupt.watch(client.start(method, params))
            for value in call:
                take(value)
            result = call.result()
        except RpcError as error:
            if interrupt.pressed and error.code == CANCELLED_CODE:
                raise Interrupted(error.data) from error
            raise
    if interrupt.pressed:  # too late to stop the request, but a script's loop is to end
        raise Interrupted
    return result


def describe(progress: Mapping[str, Any]) -> str:
    """A progress value as one short line."""
    phase, done, total = progress["phase"], progress["done"], progress["total"]
    line: str = _WORDS.get(phase, phase)
    if total:
        amount = f"{size(done)} of {size(total)}" if phase in _IN_BYTES else f"{done} of {total} tokens"
        line += f" {100 * done // total} % ({amount})"
    detail = progress.get("detail")
    return f"{line}: {detail}" if detail else line
