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
    """While entered, SIGINT cancels the watched call instead of raising; `pressed` tells. Leaving restores what was.

    The handler only sends: a KeyboardInterrupt in the middle of reading could lose half a message. A second Ctrl-C, or
    an answer that does not come within two seconds, raises KeyboardInterrupt after all. To be entered before the
    request is sent, so that there is no moment in which it runs and cannot be cancelled.
    """

    def __init__(self) -> None:
        self.pressed = False
        self._call: Call | None = None
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

    def watch(self, call: Call) -> Call:
        """Makes `call` the one that Ctrl-C cancels; at once, if it was pressed while the request was being sent."""
        self._call = call
        if self.pressed:
            call.cancel()
        return call

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        signal.setitimer(signal.ITIMER_REAL, _WAIT_S)  # before cancelling: a daemon that reads nothing blocks that too
        if self._call is not None:
            self._call.cancel()
