"""One connection: it reads frames, starts calls, writes answers, and notices when the peer is gone.

Owns its stream, its calls and their tasks, on the event loop. There is one writer at a time and no queue of frames: who
has something to say waits for the socket, so a peer that never reads holds one frame per running call. A connection
ends its calls itself, by `Call.abandon`; their tasks are never cancelled from outside, because the cancellation would
have to pass through jsonrpcserver's `gather`, again and again.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import anyio
from anyio.abc import SocketAttribute, SocketStream, TaskGroup

from omlxd.engine.api import Backend, Subscription
from omlxd.rpc.activity import Activity
from omlxd.rpc.calls import Call
from omlxd.rpc.dispatch import Dispatcher, response
from omlxd.rpc.envelope import NULL, Key, Member, Refused, leading_id, read_frame
from omlxd.rpc.errors import ErrorBody, invalid_request, parse_error
from omlxd.rpc.following import Following
from omlxd.rpc.framing import Broken, Frame, FrameReader, Oversized
from omlxd.rpc.peer import has_hung_up
from omlxd.rpc.running import Running

RECEIVE_BYTES: Final = 1 << 18
HANG_UP_POLL_S: Final = 0.2

Job = Call | bytes  # a call to be dispatched, or an answer that is ready


@dataclass(frozen=True, slots=True)
class RpcLimits:
    """`max_frame_bytes` bounds one frame from a client, `max_in_flight` the running requests of one connection.

    `stall_s` is how long a client may send nothing in the middle of a frame. Between frames it may for ever.
    """

    max_frame_bytes: int = 64 * 1024 * 1024
    max_in_flight: int = 256
    stall_s: float = 60.0


class Connection:
    """Serves one accepted socket until the peer leaves or `abandon` is called."""

    def __init__(self, stream: SocketStream, *, backend: Backend, dispatcher: Dispatcher, limits: RpcLimits) -> None:
        self.is_initialized = False
        self.activity = Activity()
        self._stream = stream
        self._socket: socket.socket = stream.extra(SocketAttribute.raw_socket)
        self._backend = backend
        self._dispatcher = dispatcher
        self._limits = limits
        self._frames = FrameReader(limits.max_frame_bytes)
        self._running = Running(limits.max_in_flight)
        self._following = Following(self.notify)
        self._writing = anyio.Lock(fast_acquire=True)
        self._is_leaving = False
        self._is_dead = False

    async def run(self) -> None:
        async with self._stream, self._following, anyio.create_task_group() as tasks:
            await self._read(tasks)
            await self._see_off()

    def abandon(self) -> None:
        """Ends the connection now: nobody hears the answers, so nothing goes on. Idempotent."""
        if self._is_dead:
            return
        self._is_dead = True
        self._running.abandon_all()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader and whoever is writing
        except OSError:
            return  # the peer was faster

    # What a method may ask for: calls.Client

    async def notify(self, body: bytes) -> None:
        # Every token of every row comes by here, and whoever sends it waits for the next one anyway.
        await self._send(body, at_once=True)

    def cancel(self, *, key: Key | None, token: Key | None) -> bool:
        return self._running.cancel(key=key, token=token)

    def follow(self, subscription: Subscription) -> str | None:
        return self._following.add(subscription)

    def leave(self) -> None:
        self._is_leaving = True
        self._running.cancel_all()

    # Reading

    async def _read(self, tasks: TaskGroup) -> None:
        """Takes in frames until there will be no more that matter."""
        while not self._is_leaving:
            try:
                self._frames.feed(await self._receive())
            except TimeoutError:
                await self._take(Broken(f"nothing came for {self._limits.stall_s:g} s in the middle of a frame"), tasks)
                return
            except anyio.EndOfStream:
                await self._take(self._frames.finish(), tasks)
                return
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self.abandon()
                return
            while not self._is_leaving and (frame := self._frames.take()) is not None:
                await self._take(frame, tasks)

    async def _receive(self) -> bytes:
        """Raises TimeoutError for a peer that stopped halfway: what it has sent would be held for ever.

        By the loop's clock, which stands still while the machine sleeps and does not jump.
        """
        if self._frames.is_at_edge:
            return await self._stream.receive(RECEIVE_BYTES)
        with anyio.fail_after(self._limits.stall_s):
            return await self._stream.receive(RECEIVE_BYTES)

    async def _take(self, frame: Frame | None, tasks: TaskGroup) -> None:
        match frame:
            case bytes() if not self._is_dead:
                await self._take_members(frame, tasks)
            case Oversized(head):
                limit = self._limits.max_frame_bytes
                error = invalid_request(f"the frame is over {limit} bytes; send less, or raise rpc.max_frame_bytes")
                await self._refuse(error, leading_id(head))
            case Broken(reason):
                self._is_leaving = True
                await self._refuse(parse_error(f"{reason}; the connection ends here"), NULL)

    async def _refuse(self, error: ErrorBody, id_: bytes) -> None:
        self.activity.begin()
        await self._answer([response(id_, error)], is_batch=False)

    async def _take_members(self, frame: bytes, tasks: TaskGroup) -> None:
        """Calls that take time go to a task; what is answered at once is answered before the next frame is read."""
        taken = read_frame(frame)
        jobs = [job for job in map(self._admit, taken.members) if job is not None]
        if not jobs:
            return
        self.activity.begin()
        if any(job in self._running for job in jobs):
            tasks.start_soon(self._answer_in_task, jobs, taken.is_batch)
        else:
            await self._answer(jobs, is_batch=taken.is_batch)

    def _admit(self, member: Member) -> Job | None:
        """None where there is nobody to tell that a notification was refused."""
        if isinstance(member, Refused):
            return response(member.id, member.error)
        call = Call(member, self, self._backend)
        takes_time = self._dispatcher.takes_time(call.method)
        refusal = self._running.refusal(call, takes_time=takes_time)
        if refusal is not None:
            return None if call.id is None else response(call.id, refusal)
        if takes_time:
            call.read_tokens()
            self._running.add(call)
        return call

    # Answering

    async def _answer_in_task(self, jobs: Sequence[Job], is_batch: bool) -> None:
        await self._answer(jobs, is_batch=is_batch)

    async def _answer(self, jobs: Sequence[Job], *, is_batch: bool) -> None:
        """The ids are free again only when the answer is written: until then it is a frame that we hold."""
        try:
            answer = await self._batch(jobs) if is_batch else await self._one(jobs[0])
            if answer is not None:
                await self._send(answer)
            self._following.begin()
        finally:
            for job in jobs:
                if isinstance(job, Call):
                    self._running.discard(job)
            self.activity.end()

    async def _one(self, job: Job) -> bytes | None:
        return await self._dispatcher.answer(job) if isinstance(job, Call) else job

    async def _batch(self, jobs: Sequence[Job]) -> bytes | None:
        """Members that take time side by side, the others one by one, so that a huge batch leaves others their turns.

        One array when the last has ended, nothing for notifications alone.
        """
        answers: list[bytes | None] = [None] * len(jobs)

        async def fill(index: int, job: Job) -> None:
            answers[index] = await self._one(job)

        async with anyio.create_task_group() as tasks:
            for index, job in enumerate(jobs):
                if job in self._running:
                    tasks.start_soon(fill, index, job)
            for index, job in enumerate(jobs):
                if job not in self._running:
                    await fill(index, job)
        told = [answer for answer in answers if answer is not None]
        return b"[%b]" % b",".join(told) if told else None

    async def _send(self, body: bytes, *, at_once: bool = False) -> None:
        """Writes one frame; `at_once` without letting others have their turn first, if the socket takes it."""
        async with self._writing:
            if self._is_dead:
                return
            frame = self._frames.wrap(body)
            try:
                rest = frame[self._taken(frame) :] if at_once else frame
                if rest:
                    await self._stream.send(rest)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self.abandon()

    def _taken(self, frame: bytes) -> int:
        """How much of it the socket takes without waiting: nearly always all."""
        try:
            return self._socket.send(frame)
        except OSError:  # full, or broken, which the stream then finds out
            return 0

    async def _see_off(self) -> None:
        """Nothing more is read; the answers still due are written, unless the peer leaves altogether before that."""
        while not self.activity.is_idle:
            if has_hung_up(self._socket):
                self.abandon()
            with anyio.move_on_after(HANG_UP_POLL_S):
                await self.activity.wait_idle()
