"""The daemon's life on the event loop: serve, hear that it should end, drain, close.

Owns the order of ending and its deadlines. Called once by `daemon.main` with a socket that is already listening; runs
on the main thread. What a model is, it does not know: the service does the work, the server the wire.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Protocol

import anyio
from anyio.abc import TaskStatus

from omlxd.daemon.idle import IdleClock
from omlxd.daemon.listener import Listener
from omlxd.daemon.reload import LiveSettings
from omlxd.daemon.settings import Settings
from omlxd.engine.api import Backend, OmlxError
from omlxd.rpc.connection import RpcLimits
from omlxd.rpc.server import Server

CLOSE_S = 5.0  # for ending what is left after the grace, threads included
DISK_S = 3.0  # of the grace, for the cache's disk, if the requests have left no more
FLUSH_S = 1.0  # for answers that are written and not yet read

_log = logging.getLogger(__name__)

OnShutdown = Callable[[float | None], None]


class Service(Backend, Protocol):
    """The backend with a beginning and an end. Both are called on the event loop."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is live or a model is on its way in or out, for whomever."""
        ...

    async def start(self) -> None: ...

    async def close(self, disk_s: float) -> None:
        """Ends every request that is left with ShuttingDown, and every thread; bounded in time.

        What waits for the cache's disk is written for at most `disk_s`.
        """
        ...


class _End:
    """When the daemon should end. A request for the end may only bring it nearer."""

    def __init__(self, default_grace_s: float) -> None:
        self.default_grace_s = default_grace_s
        self.wanted = anyio.Event()
        self.grace = anyio.CancelScope()  # cancelled when the grace is over
        self.closing = anyio.CancelScope()  # of what comes then

    def ask(self, grace_s: float | None) -> None:
        grace_s = self.default_grace_s if grace_s is None else grace_s
        self.grace.deadline = min(self.grace.deadline, anyio.current_time() + grace_s)
        self.closing.deadline = min(self.closing.deadline, self.grace.deadline + DISK_S + CLOSE_S)
        if not self.wanted.is_set():
            _log.info("stopping; live requests have %g s to end", grace_s)
        self.wanted.set()


async def run(listener: Listener, live: LiveSettings, build: Callable[[OnShutdown], Service]) -> None:
    """Serves on `listener` until a signal, `daemon.shutdown` or `daemon.idle_exit_s`, then ends what runs.

    `build` makes the service. While it drains, the service refuses new work; a second signal ends the grace at once.
    """
    settings = live.started
    end = _End(settings.daemon.grace_s)
    service = build(end.ask)
    server = Server(service, RpcLimits(settings.rpc.max_frame_bytes, settings.rpc.max_in_flight))
    idle = IdleClock(lambda: None if service.is_busy else server.quiet_since(), settings.daemon.idle_exit_s)

    def take_up(new: Settings) -> None:
        end.default_grace_s = new.daemon.grace_s
        idle.set_limit(new.daemon.idle_exit_s)

    live.taken_up_by(take_up, "daemon.grace_s", "daemon.idle_exit_s")
    async with anyio.create_task_group() as tasks:
        await tasks.start(_obey_signals, service, end)
        tasks.start_soon(server.serve, listener.socket)
        await service.start()
        _log.info("ready at %s", listener.path)
        tasks.start_soon(_end_when_idle, idle, listener, server, service)
        await end.wanted.wait()
        await _wind_up(server, service, end)
        tasks.cancel_scope.cancel()
    _log.info("stopped")


async def _end_when_idle(idle: IdleClock, listener: Listener, server: Server, service: Service) -> None:
    """Asks for the end unless somebody is just coming in. No client that has connected is lost.

    Between the look at the door and closing it nothing else runs. Our own socket has lost its name by then; who comes
    to one that a supervisor holds waits there for the next daemon.
    """
    while True:
        await idle.wait()
        listener.hide()
        if not listener.has_visitor():
            _log.info("nobody has asked for anything; ending as daemon.idle_exit_s says")
            server.stop_accepting()
            service.request_shutdown(None)
            return
        listener.show()


async def _wind_up(server: Server, service: Service, end: _End) -> None:
    with end.grace:
        await server.drain()
    if end.grace.cancelled_caught:
        _log.warning("the grace is over; ending the requests that still run")
    with end.closing:
        await service.close(max(DISK_S, end.grace.deadline - anyio.current_time()))
    if end.closing.cancelled_caught:
        _log.error("the service did not close in time; leaving it")
    with anyio.move_on_after(FLUSH_S):
        await server.drain()


async def _obey_signals(
    service: Service, end: _End, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGHUP:
                await _reload(service)
            elif end.wanted.is_set():
                _log.info("%s again: not waiting any longer", number.name)
                end.ask(0.0)
            else:
                _log.info("%s", number.name)
                service.request_shutdown(None)


async def _reload(service: Service) -> None:
    """What the service says about it is in the log already; a refusal changes nothing and must not end the daemon."""
    try:
        await service.reload()
    except OmlxError as error:
        _log.error("SIGHUP: %s; the settings stay as they were", error)
