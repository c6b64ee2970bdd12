"""A real wire server in a thread, over the backend that plays a script: what `omlxctl` talks to in these tests."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from omlxd.engine.api import Delta, GenerateRequest, GenerationResult, Progress
from omlxd.rpc.server import Server
from tests.cli.running import Home
from tests.fakes import FakeBackend, FakeGeneration, result_of


class Gate(anyio.Event):
    """Never opens; says when somebody waits at it."""

    def __new__(cls, begun: threading.Event) -> "Gate":
        return object.__new__(cls)

    def __init__(self, begun: threading.Event) -> None:
        self._begun = begun

    async def wait(self) -> None:
        self._begun.set()
        await anyio.sleep_forever()


class Answer:
    """One answer that the test writes while `omlxctl` waits for it. Made and changed on the server's loop."""

    def __init__(self, portal: BlockingPortal) -> None:
        self._portal = portal
        self._asked = threading.Event()
        self._generation: FakeGeneration | None = None
        self.request: GenerateRequest | None = None

    def script(self, request: GenerateRequest) -> FakeGeneration:
        self.request = request
        self._generation = FakeGeneration()
        self._asked.set()
        return self._generation

    @property
    def generation(self) -> FakeGeneration:
        """Waits until it has been asked for."""
        assert self._asked.wait(30)
        assert self._generation is not None
        return self._generation

    def push(self, *events: Delta | Progress | str) -> None:
        for event in events:
            self._portal.call(self.generation.push, Delta(event) if isinstance(event, str) else event)

    def finish(self, result: GenerationResult | str | None = None) -> None:
        """With a text: the answer as a whole. With nothing: what was pushed."""
        generation = self.generation
        if result is None:
            result = generation.produced
        self._portal.call(generation.finish, result if isinstance(result, GenerationResult) else result_of(result))

    def wait_cancelled(self) -> None:
        """Returns when the request was cancelled; fails if it ends otherwise or goes on."""

        async def ended() -> None:
            with anyio.fail_after(30):
                async for _ in self.generation:
                    pass

        self._portal.call(ended)
        assert self.generation.is_cancelled


class Daemon:
    """The server's thread. `backend` may be changed before a command is started."""

    def __init__(self, backend: FakeBackend, portal: BlockingPortal, listener: socket.socket) -> None:
        self.backend = backend
        self.portal = portal
        self._serving = portal.start_task_soon(Server(backend).serve, listener)

    def answer(self) -> Answer:
        """What the next generation does is up to the test."""
        answer = Answer(self.portal)
        self.backend.script = answer.script
        return answer

    def hold_loads(self) -> threading.Event:
        """Loading a model goes on for ever from here; the event is set when a load has begun."""
        begun = threading.Event()
        self.backend.load_gate = self.portal.call(lambda: Gate(begun))
        return begun

    def stop(self) -> None:
        """Ends every connection. Idempotent."""
        self._serving.cancel()
        wait([self._serving])


@contextmanager
def serving(home: Home, backend: FakeBackend | None = None) -> Iterator[Daemon]:
    home.path.mkdir(mode=0o700)
    backend = backend or FakeBackend()
    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    listener.bind(home.socket)
    os.chmod(home.socket, 0o600)
    listener.listen()
    with start_blocking_portal() as portal:
        daemon = Daemon(backend, portal, listener)
        yield daemon
        daemon.stop()
