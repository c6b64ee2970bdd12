"""The daemon's life, from ready to gone, with a service that plays a script."""

import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest

from omlxd.daemon.listener import Listener, publish
from omlxd.daemon.lock import InstanceLock
from omlxd.daemon.reload import LiveSettings
from omlxd.daemon.run import DISK_S, OnShutdown, run
from omlxd.daemon.settings import DaemonSettings, Settings
from omlxd.engine.api import GenerateRequest, Generation, Reloaded, ShuttingDown, StorageFailed
from tests.fakes import FakeBackend, FakeGeneration, refusing, result_of

FOR_EVER_S = 3600.0


@dataclass
class FakeService(FakeBackend):
    """One generation at a time, which the test ends; refuses new ones once it was told to stop."""

    tell: OnShutdown | None = None
    generation: FakeGeneration = field(default_factory=FakeGeneration)
    started: bool = False
    closed: bool = False
    loading: bool = False
    looks: int = 0
    reloads: int = 0
    disk_s: float = 0.0

    @property
    def is_busy(self) -> bool:
        self.looks += 1
        return self.loading

    async def reload(self) -> Reloaded:
        self.reloads += 1
        return await super().reload()

    async def start(self) -> None:
        self.started = True

    async def close(self, disk_s: float) -> None:
        self.closed = True
        self.disk_s = disk_s
        self.generation.fail(ShuttingDown())

    def request_shutdown(self, grace_s: float | None) -> None:
        super().request_shutdown(grace_s)
        assert self.tell is not None
        self.tell(grace_s)

    def generate(self, request: GenerateRequest) -> Generation:
        if self.shutdowns:
            return refusing(ShuttingDown())
        super().generate(request)
        return self.generation


class Daemon:
    """A running daemon and a connection to it."""

    def __init__(self, service: FakeService, listener: Listener, client: anyio.abc.SocketStream) -> None:
        self.service = service
        self.listener = listener
        self.ended = anyio.Event()
        self._client = client
        self._received = b""

    async def send(self, id: int, method: str, **params: object) -> None:
        message = {"jsonrpc": "2.0", "id": id, "method": method, "params": params}
        await self._client.send(json.dumps(message).encode() + b"\n")

    async def answer(self) -> dict[str, object]:
        while b"\n" not in self._received:
            self._received += await self._client.receive()
        line, _, self._received = self._received.partition(b"\n")
        return dict(json.loads(line))

    async def generating(self) -> None:
        """Sends a generation, id 1, and returns when it runs."""
        await self.send(1, "generate.complete", model="tiny", prompt="hello")
        await self.send(2, "ping")
        assert await self.answer() == {"jsonrpc": "2.0", "id": 2, "result": "pong"}
        assert self.service.requests

    async def looked_at(self, *, times: int) -> None:
        """Returns when it has been asked so often whether it is idle."""
        until = self.service.looks + times
        while self.service.looks < until:
            await anyio.lowlevel.checkpoint()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "omlxd.sock")


@asynccontextmanager
async def running(path: str, settings: Settings) -> AsyncIterator[Daemon]:
    service = FakeService()

    def build(tell: OnShutdown) -> FakeService:
        service.tell = tell
        return service

    with InstanceLock(f"{path}.lock", "1") as lock, publish(path, lock) as listener:
        async with anyio.create_task_group() as tasks, await anyio.connect_unix(path) as client:
            daemon = Daemon(service, listener, client)

            async def live() -> None:
                await run(listener, LiveSettings(settings, lambda: settings), build)
                daemon.ended.set()

            tasks.start_soon(live)
            yield daemon


def play(
    path: str,
    scene: Callable[[Daemon], Awaitable[None]],
    *,
    grace_s: float = FOR_EVER_S,
    settings: Settings | None = None,
) -> FakeService:
    """Runs `scene` with a daemon, which has to end. The service is what is left of it."""
    settings = settings or Settings(daemon=DaemonSettings(grace_s=grace_s))

    async def stage() -> FakeService:
        with anyio.fail_after(20):
            async with running(path, settings) as daemon:
                await scene(daemon)
                await daemon.ended.wait()
            return daemon.service

    return anyio.run(stage)


def test_a_client_that_came_before_the_loop_is_answered(path: str):
    async def scene(daemon: Daemon) -> None:
        await daemon.send(1, "ping")
        assert (await daemon.answer())["result"] == "pong"
        await daemon.send(2, "daemon.shutdown")
        assert (await daemon.answer())["result"] is True

    service = play(path, scene)
    assert service.started
    assert service.closed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_an_idle_daemon(path: str, number: signal.Signals):
    async def scene(daemon: Daemon) -> None:
        await daemon.send(1, "ping")
        await daemon.answer()
        os.kill(os.getpid(), number)

    assert play(path, scene).shutdowns == [None]


def test_a_live_request_may_end_within_the_grace_and_new_ones_are_refused(path: str):
    async def scene(daemon: Daemon) -> None:
        await daemon.generating()
        os.kill(os.getpid(), signal.SIGTERM)
        while not daemon.service.shutdowns:
            await anyio.lowlevel.checkpoint()
        await daemon.send(3, "generate.complete", model="tiny", prompt="too late")
        refused = await daemon.answer()
        assert (refused["id"], refused["error"]["code"]) == (3, -32018)  # type: ignore[index]
        assert not daemon.service.closed
        daemon.service.generation.finish(result_of("done in time"))
        answer = await daemon.answer()
        assert (answer["id"], answer["result"]["text"]) == (1, "done in time")  # type: ignore[index]

    assert play(path, scene).closed


def test_when_the_grace_is_over_what_runs_is_ended_with_one_error(path: str):
    async def scene(daemon: Daemon) -> None:
        await daemon.generating()
        os.kill(os.getpid(), signal.SIGTERM)
        answer = await daemon.answer()
        assert answer["error"]["data"] == {"kind": "shutting_down"}  # type: ignore[index]
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await daemon.answer()

    play(path, scene, grace_s=0.05)


def test_a_second_signal_ends_the_grace(path: str):
    async def scene(daemon: Daemon) -> None:
        await daemon.generating()
        os.kill(os.getpid(), signal.SIGTERM)
        while not daemon.service.shutdowns:
            await anyio.lowlevel.checkpoint()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await daemon.answer())["error"]["code"] == -32018  # type: ignore[index]

    assert play(path, scene).shutdowns == [None]


def test_a_shutdown_names_its_own_grace(path: str):
    async def scene(daemon: Daemon) -> None:
        await daemon.generating()
        await daemon.send(3, "daemon.shutdown", grace_s=0)
        answers = {answer["id"]: answer async for answer in _answers(daemon, 2)}
        assert answers[3]["result"] is True
        assert answers[1]["error"]["code"] == -32018  # type: ignore[index]

    assert play(path, scene).shutdowns == [0]


@pytest.mark.parametrize(("grace_s", "least"), [(60.0, 30.0), (0.0, DISK_S)])
def test_what_the_requests_leave_of_the_grace_is_the_disks_and_some_seconds_always(
    path: str, grace_s: float, least: float
):
    async def scene(daemon: Daemon) -> None:
        await daemon.send(1, "daemon.shutdown")
        await daemon.answer()

    assert least <= play(path, scene, grace_s=grace_s).disk_s <= max(grace_s, DISK_S)


async def _answers(daemon: Daemon, number: int) -> AsyncIterator[dict[str, object]]:
    for _ in range(number):
        yield await daemon.answer()


@pytest.mark.parametrize("failure", [None, StorageFailed("/h/config.toml", "unknown key engine.max_bach")])
def test_a_hang_up_signal_reads_the_settings_again_and_never_ends_the_daemon(
    path: str, failure: StorageFailed | None, caplog: pytest.LogCaptureFixture
):
    async def scene(daemon: Daemon) -> None:
        await daemon.send(1, "ping")
        await daemon.answer()
        daemon.service.failure = failure
        os.kill(os.getpid(), signal.SIGHUP)
        while not daemon.service.reloads:
            await anyio.lowlevel.checkpoint()
        await daemon.send(2, "ping")
        assert (await daemon.answer())["result"] == "pong"
        await daemon.send(3, "daemon.shutdown")

    assert play(path, scene).shutdowns == [None]
    assert ("unknown key engine.max_bach; the settings stay as they were" in caplog.text) is (failure is not None)


IDLE = Settings(daemon=DaemonSettings(grace_s=FOR_EVER_S, idle_exit_s=0.05))


def test_an_idle_daemon_ends_by_itself_and_leaves_no_socket(path: str):
    async def scene(daemon: Daemon) -> None:
        await daemon.ended.wait()  # an idle client does not keep it

    assert play(path, scene, settings=IDLE).closed
    assert os.listdir(os.path.dirname(path)) == ["omlxd.sock.lock"]


def test_a_running_call_keeps_the_daemon(path: str):
    async def scene(daemon: Daemon) -> None:
        await daemon.generating()
        await daemon.looked_at(times=3)
        assert not daemon.service.shutdowns
        daemon.service.generation.finish(result_of("done"))
        assert (await daemon.answer())["id"] == 1

    play(path, scene, settings=IDLE)


def test_a_load_that_nobody_waits_for_keeps_the_daemon(path: str):
    async def scene(daemon: Daemon) -> None:
        daemon.service.loading = True
        await daemon.looked_at(times=3)
        assert not daemon.service.shutdowns
        daemon.service.loading = False

    play(path, scene, settings=IDLE)


def test_the_loop_leaves_the_sockets_file_to_its_listener(path: str):
    async def scene(daemon: Daemon) -> None:
        await daemon.send(1, "daemon.shutdown")
        await daemon.ended.wait()
        assert os.path.exists(path)

    play(path, scene)
    assert not os.path.exists(path)
