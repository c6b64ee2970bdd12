"""A backend without MLX: models are names, tokens are bytes, and a generation does what its script says.

`FakeBackend` and `FakeGeneration` implement `engine.api.Backend` and `Generation`; they live on one event loop, like
the real ones. What a test wants to know is recorded in plain attributes.
"""

from __future__ import annotations

import difflib
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
from anyio.from_thread import BlockingPortal, start_blocking_portal

from omlxd.engine.api import (
    CacheExplanation,
    CacheLine,
    CacheNode,
    CacheTier,
    CacheVerified,
    Cancelled,
    ChatPrompt,
    DaemonEvent,
    DaemonInfo,
    DaemonMetrics,
    DaemonStatus,
    Delta,
    Difference,
    GenerateRequest,
    Generation,
    GenerationResult,
    Histogram,
    Json,
    LoadOptions,
    MemoryAction,
    MemoryCeilings,
    MemoryHolder,
    MemoryMarks,
    MemoryStatus,
    ModelEntry,
    ModelMetrics,
    ModelNotFound,
    OmlxError,
    PerTier,
    Progress,
    ProgressSink,
    Prompt,
    Reloaded,
    SessionEntry,
    SessionExists,
    SessionNotFound,
    TextPrompt,
    Timings,
    Topic,
    Unloaded,
    Usage,
)
from omlxd.rpc.server import Server

MODEL = "tiny"


def words(text: str) -> list[Delta]:
    """`text` as one delta per word, the spaces kept: what a model would stream."""
    pieces = text.split(" ")
    return [Delta(piece if index == 0 else " " + piece) for index, piece in enumerate(pieces)]


def result_of(text: str, **changes: object) -> GenerationResult:
    """A finished answer of `text`, one token per word."""
    count = len(text.split()) if text else 0
    plain = GenerationResult(
        model=MODEL,
        text=text,
        finish_reason="stop",
        usage=Usage(prompt_tokens=3, completion_tokens=count),
        timings=Timings(ttft_ms=1.0, tokens_per_s=100.0),
        seed=7,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


class FakeGeneration:
    """One answer that a test writes while it is being read, under the same contract as the engine's.

    `push` makes an event and merges it with an untaken one of its kind; `finish` and `fail` end the request.
    """

    def __init__(self) -> None:
        self.pending: list[Delta | Progress] = []
        self.produced = ""
        self.cancelled: str | None = None
        self.is_cancelled = False
        self.most_pending = 0
        self._outcome: GenerationResult | OmlxError | None = None
        self._changed = anyio.Event()

    @property
    def ended(self) -> bool:
        return self._outcome is not None

    def push(self, event: Delta | Progress, *, merge: bool = True) -> None:
        last = self.pending[-1] if self.pending and merge else None
        if isinstance(event, Delta):
            self.produced += event.text if event.channel == "content" else ""
        if isinstance(last, Delta) and isinstance(event, Delta) and last.channel == event.channel:
            event = Delta(
                last.text + event.text,
                event.channel,
                [*last.token_ids, *event.token_ids],
                [*last.logprobs, *event.logprobs],
            )
            self.pending[-1] = event
        elif isinstance(last, Progress) and isinstance(event, Progress):
            self.pending[-1] = event
        else:
            self.pending.append(event)
        self.most_pending = max(self.most_pending, len(self.pending))
        self._wake()

    def finish(self, result: GenerationResult) -> None:
        self._end(result)

    def fail(self, failure: OmlxError) -> None:
        self._end(failure)

    def cancel(self, reason: str | None = None) -> None:
        if self.ended:
            return
        self.is_cancelled = True
        self.cancelled = reason
        self._end(Cancelled(result_of(self.produced, finish_reason="cancelled"), reason))

    async def result(self) -> GenerationResult:
        while self._outcome is None:
            await self._changed.wait()
        if isinstance(self._outcome, OmlxError):
            raise self._outcome
        return self._outcome

    async def __aiter__(self) -> AsyncIterator[Delta | Progress]:
        while True:
            while self.pending:
                yield self.pending.pop(0)
            if self.ended:
                return
            await self._changed.wait()

    def _end(self, outcome: GenerationResult | OmlxError) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class FakeSubscription:
    """A subscription that a test fills: `push` sends an event, with how many were dropped before it."""

    def __init__(self, id: str, topics: Collection[Topic]) -> None:
        self.id = id
        self.topics = frozenset(topics)
        self.waiting: list[tuple[DaemonEvent, int]] = []
        self.is_closed = False
        self._changed = anyio.Event()

    def push(self, topic: Topic, dropped: int = 0, **fields: Json) -> None:
        self.waiting.append((DaemonEvent(topic, 7.5, fields), dropped))
        self._wake()

    def close(self) -> None:
        self.is_closed = True
        self._wake()

    async def __aiter__(self) -> AsyncIterator[tuple[DaemonEvent, int]]:
        while not self.is_closed:
            if self.waiting:
                yield self.waiting.pop(0)
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def answering(text: str, *, progress: Sequence[Progress] = (), **changes: object) -> FakeGeneration:
    """A generation that has already said `text`, word by word."""
    generation = FakeGeneration()
    for event in [*progress, *words(text)]:
        generation.push(event, merge=False)
    generation.finish(result_of(text, **changes))
    return generation


def refusing(failure: OmlxError) -> FakeGeneration:
    """A generation that was refused."""
    generation = FakeGeneration()
    generation.fail(failure)
    return generation


def last_words(request: GenerateRequest) -> str:
    """The text that was asked: the last message's content, or the prompt."""
    if isinstance(request.prompt, ChatPrompt):
        return str(request.prompt.messages[-1]["content"])
    if isinstance(request.prompt, TextPrompt):
        return request.prompt.text
    return bytes(request.prompt.token_ids).decode()


@dataclass
class FakeBackend:
    """Knows one model, `tiny`. `generate` calls `script`; by default every prompt is echoed, word by word."""

    script: Callable[[GenerateRequest], Generation] | None = None
    models: dict[str, ModelEntry] = field(default_factory=lambda: {MODEL: entry(MODEL)})
    load_progress: Sequence[Progress] = (Progress("load", 1, 2), Progress("load", 2, 2))
    load_gate: anyio.Event | None = None
    failure: BaseException | None = None
    requests: list[GenerateRequest] = field(default_factory=list)
    loads: list[tuple[str, LoadOptions]] = field(default_factory=list)
    pulls: list[tuple[str, str | None]] = field(default_factory=list)
    given_up: int = 0
    shutdowns: list[float | None] = field(default_factory=list)
    subscriptions: list[FakeSubscription] = field(default_factory=list)
    clears: list[tuple[str | None, str]] = field(default_factory=list)
    sessions: dict[str, SessionEntry] = field(default_factory=dict)
    nodes: Sequence[CacheNode] = ()
    on_shutdown: Callable[[], None] | None = None
    memory: MemoryStatus = field(default_factory=lambda: memory_status(75 * 10**9, "balanced"))

    def info(self) -> DaemonInfo:
        if self.failure is not None:
            raise self.failure
        return DaemonInfo(
            version="0.1.0",
            pid=42,
            uptime_s=1.5,
            home="/home/omlxd",
            socket="/home/omlxd/omlxd.sock",
            device="cpu",
            platform="test",
            mlx="0",
            mlx_lm="0",
            mlx_vlm="0",
        )

    def status(self) -> DaemonStatus:
        return DaemonStatus(
            info=self.info(),
            models=list(self.models.values()),
            requests=[],
            counts={"finished": len(self.requests)},
            memory={"footprint_bytes": 1},
            cache={},
        )

    def request_shutdown(self, grace_s: float | None) -> None:
        self.shutdowns.append(grace_s)
        if self.on_shutdown is not None:
            self.on_shutdown()

    async def reload(self) -> Reloaded:
        if isinstance(self.failure, OmlxError):
            raise self.failure
        return Reloaded(["log.level"], ["engine.max_batch"])

    async def list_models(self) -> Sequence[ModelEntry]:
        return list(self.models.values())

    async def load_model(self, model: str, options: LoadOptions, progress: ProgressSink) -> ModelEntry:
        self._known(model)
        self.loads.append((model, options))
        for step in self.load_progress:
            progress(step)
            await anyio.lowlevel.checkpoint()
        await self._wait_at_gate()
        self.models[model] = replace(self.models[model], state="READY", pinned=options.pin)
        return self.models[model]

    async def unload_model(self, model: str, *, now: bool) -> Unloaded:
        self._known(model)
        self.models[model] = replace(self.models[model], state="ABSENT")
        return Unloaded(self.models[model], freed_bytes=1000)

    async def pin_model(self, model: str, *, pinned: bool) -> ModelEntry:
        self._known(model)
        self.models[model] = replace(self.models[model], pinned=pinned)
        return self.models[model]

    async def remove_model(self, model: str) -> int:
        self._known(model)
        return self.models.pop(model).size_bytes

    def memory_status(self) -> MemoryStatus:
        return self.memory

    def set_memory(self, tier: Any, limit_bytes: int | None) -> MemoryStatus:
        """The fake's machine has 100 GB; a tier leaves 25 of them."""
        static = 75 * 10**9 if limit_bytes is None else limit_bytes
        self.memory = memory_status(static, tier or "custom")
        return self.memory

    async def pull_model(self, source: str, name: str | None, progress: ProgressSink) -> ModelEntry:
        self.pulls.append((source, name))
        progress(Progress("download", 1, 1))
        await self._wait_at_gate()
        return self.models.setdefault(name or source, entry(name or source))

    def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        if request.model not in self.models:
            return refusing(self._not_found(request.model))
        if request.warm and self.script is None:
            return answering("", usage=Usage(prompt_tokens=len(last_words(request)), cached_tokens=2))
        return self.script(request) if self.script is not None else answering(last_words(request))

    async def tokenize(self, model: str, prompt: Prompt) -> Sequence[int]:
        self._known(model)
        text = prompt.text if isinstance(prompt, TextPrompt) else str(prompt)
        return list(text.encode())

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        self._known(model)
        return bytes(token_ids).decode()

    def metrics(self) -> DaemonMetrics:
        histogram = Histogram((0.5, 1), (3, 0, 1), 4.5)
        model = ModelMetrics({"prompt_tokens": 12}, {"ttft_s": histogram})
        return DaemonMetrics({"uptime_s": 1.5, "live_requests": 2}, {"finished": 7}, {MODEL: model})

    def subscribe(self, topics: Collection[Topic]) -> FakeSubscription:
        self.subscriptions.append(FakeSubscription(f"s{len(self.subscriptions) + 1}", topics))
        return self.subscriptions[-1]

    async def cache_stats(self, model: str | None) -> Sequence[CacheLine]:
        if model is not None:
            self._known(model)
        return [cache_line(name) for name in self.models if model in (None, name)]

    async def explain_cache(self, model: str, prompt: Prompt) -> CacheExplanation:
        """The fake has seen `hello world` before."""
        tokens = await self.tokenize(model, prompt)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, b"hello world", strict=False))
        matched = sum(1 for _ in same)
        if matched == len(tokens):
            return CacheExplanation(len(tokens), matched, "full")
        differs = Difference(matched, "hello world", bytes(tokens).decode())
        return CacheExplanation(len(tokens), matched, "differs", differs)

    async def inspect_cache(self, model: str, limit: int, session: str | None) -> Sequence[CacheNode]:
        self._known(model)
        return self.nodes[:limit]

    async def verify_cache(self, model: str | None) -> CacheVerified:
        return CacheVerified(len(self.nodes), 0, 0)

    async def save_session(
        self, model: str, name: str, prompt: Prompt, *, replace: bool, progress: ProgressSink
    ) -> SessionEntry:
        if name in self.sessions and not replace:
            raise SessionExists(model, name)
        self.sessions[name] = SessionEntry(name, model, len(await self.tokenize(model, prompt)), 4096, 1.7e9, 1.7e9)
        return self.sessions[name]

    async def list_sessions(self, model: str | None) -> Sequence[SessionEntry]:
        return [session for session in self.sessions.values() if model in (None, session.model)]

    async def delete_session(self, model: str, name: str) -> SessionEntry:
        if name not in self.sessions:
            raise SessionNotFound(model, name)
        return self.sessions.pop(name)

    async def export_session(self, model: str, name: str, path: str) -> SessionEntry:
        if name not in self.sessions:
            raise SessionNotFound(model, name)
        return self.sessions[name]

    async def import_session(self, model: str, name: str, path: str) -> SessionEntry:
        return await self.save_session(model, name, TextPrompt(path), replace=False, progress=lambda _: None)

    async def clear_cache(self, model: str | None, tier: CacheTier) -> int:
        if model is not None:
            self._known(model)
        self.clears.append((model, tier))
        return 0 if tier == "ssd" else 4096

    async def _wait_at_gate(self) -> None:
        if self.load_gate is None:
            return
        try:
            await self.load_gate.wait()
        except anyio.get_cancelled_exc_class():
            self.given_up += 1
            raise

    def _known(self, model: str) -> None:
        if model not in self.models:
            raise self._not_found(model)

    def _not_found(self, model: str) -> ModelNotFound:
        return ModelNotFound(model, difflib.get_close_matches(model, self.models))


def memory_status(static: int, tier: Any) -> MemoryStatus:
    """A model of 8 GB on a quiet machine."""
    return MemoryStatus(
        footprint_bytes=8_300_000_000,
        ledger_bytes=8_200_000_000,
        pool_bytes=50_000_000,
        difference_bytes=50_000_000,
        level="OK",
        limits=MemoryMarks(static * 90 // 100, static * 96 // 100, static * 98 // 100),
        ceilings=MemoryCeilings(static, 90 * 10**9, None),
        binding="static",
        tier=tier,
        entries=[MemoryHolder(MODEL, "weights", 8 * 10**9), MemoryHolder("omlxd", "process", 200_000_000)],
        actions=[MemoryAction(1.7e9, "no request is admitted", "90 bytes used", 0)],
    )


def cache_line(model: str) -> CacheLine:
    """A cache that has answered three prompts of four."""
    return CacheLine(
        model=model,
        hits=3,
        misses=1,
        tokens_matched=6000,
        tokens_computed=2000,
        blocks=PerTier(hot=24),
        checkpoints=2,
        bytes=PerTier(hot=98_000_000),
        evictions=5,
        writes_dropped=0,
        bad_blocks=0,
    )


def entry(name: str) -> ModelEntry:
    """A model on disk that is not loaded."""
    return ModelEntry(name=name, path=f"/models/{name}", kind="llama", state="ABSENT", size_bytes=1000)


@contextmanager
def serving_in_thread(backend: FakeBackend, path: Path) -> Iterator[BlockingPortal]:
    """A server of `backend` at `path`, on a loop in a thread of its own, for clients that block.

    Ready when entered: who connects before the loop runs waits in the backlog. The portal calls what belongs on that
    loop (`portal.call(generation.finish, result)`).
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(64)
    listener.setblocking(False)
    with start_blocking_portal() as portal:
        serving = portal.start_task_soon(Server(backend).serve, listener)
        try:
            yield portal
        finally:
            serving.cancel()
