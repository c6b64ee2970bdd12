"""Ctrl-C while a request runs: the first one cancels the request, and the answer that the daemon still owes is awaited.

Owns the process's SIGINT handler for the time of one request. Main thread only.
"""

from __future__ import annotations

import signal

from omlxd.rpc.client import Call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType

_WAIT_S = 2.0


class CancelOnInterrupt:
    """While entered, SIGINT cancels `call` instead of raising; `pressed` tells. Leaving restores what was before.

    The handler only sends: a KeyboardInterrupt in the middle of reading could lose half a message. A second Ctrl-C, or
    an answer that does not come within two seconds, raises KeyboardInterrupt after all.
    """

    def __init__(self, call: Call) -> None:
        self.pressed = False
        self._call = call
        self._ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as for `omlxctl ... &` in a script

    def __enter__(self) -> CancelOnInterrupt:
        if not self._ignored:
            self._before = signal.signal(signal.SIGINT, self._interrupt)
            self._alarm_before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ignored:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._alarm_before)
            signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        signal.setitimer(signal.ITIMER_REAL, _WAIT_S)  # before cancelling: a daemon that reads nothing blocks that too
        self._call.cancel()
