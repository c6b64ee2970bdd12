"""The hinge between the rooms: requests, events, results, the protocols and the error tree, all under one name.

Standard library only, so that `rpc/` can be written and tested without MLX. Every value is frozen and may be held by
any thread. `Backend` is all that `rpc/` asks of the rest of the daemon; `Generation` is one running request as the
event loop sees it. The values and errors stand in three modules of their own, which nobody else imports.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Literal, Protocol

from omlxd.engine.errors import (
    Cancelled,
    ContextTooLong,
    EngineFailed,
    InvalidGrammar,
    InvalidParams,
    InvariantError,
    MemoryExceeded,
    ModelBusy,
    ModelLoadFailed,
    ModelNotFound,
    OmlxError,
    QueueFull,
    SessionExists,
    SessionNotFound,
    ShuttingDown,
    StorageFailed,
    Unsupported,
)
from omlxd.engine.generation import (
    Channel,
    ChatPrompt,
    Delta,
    FinishReason,
    GenerateRequest,
    GenerationResult,
    Json,
    LoadOptions,
    MalformedCall,
    Phase,
    Progress,
    Prompt,
    PromptPicture,
    Sampling,
    Stopping,
    TextPrompt,
    Thinking,
    Timings,
    TokenLogprob,
    TokenPrompt,
    Usage,
)
from omlxd.engine.readings import (
    CacheExplanation,
    CacheLine,
    CacheNode,
    CacheReason,
    CacheTier,
    CacheVerified,
    DaemonEvent,
    DaemonInfo,
    DaemonMetrics,
    DaemonStatus,
    Difference,
    Histogram,
    MemoryAction,
    MemoryCeilings,
    MemoryHolder,
    MemoryMarks,
    MemoryStatus,
    ModelEntry,
    ModelMetrics,
    ModelState,
    PerTier,
    Reloaded,
    RequestInfo,
    SessionEntry,
    Topic,
    Unloaded,
)

__all__ = [
    "Backend",
    "CacheExplanation",
    "CacheLine",
    "CacheNode",
    "CacheReason",
    "CacheTier",
    "CacheVerified",
    "Cancelled",
    "Channel",
    "ChatPrompt",
    "ContextTooLong",
    "DaemonEvent",
    "DaemonInfo",
    "DaemonMetrics",
    "DaemonStatus",
    "Delta",
    "Difference",
    "EngineFailed",
    "FinishReason",
    "GenerateRequest",
    "Generation",
    "GenerationResult",
    "Histogram",
    "InvalidGrammar",
    "InvalidParams",
    "InvariantError",
    "Json",
    "LoadOptions",
    "MalformedCall",
    "MemoryAction",
    "MemoryCeilings",
    "MemoryExceeded",
    "MemoryHolder",
    "MemoryMarks",
    "MemoryStatus",
    "ModelBusy",
    "ModelEntry",
    "ModelLoadFailed",
    "ModelMetrics",
    "ModelNotFound",
    "ModelState",
    "OmlxError",
    "PerTier",
    "Phase",
    "Progress",
    "ProgressSink",
    "Prompt",
    "PromptPicture",
    "QueueFull",
    "Reloaded",
    "RequestInfo",
    "Sampling",
    "SessionEntry",
    "SessionExists",
    "SessionNotFound",
    "ShuttingDown",
    "Stopping",
    "StorageFailed",
    "Subscription",
    "TextPrompt",
    "Thinking",
    "Timings",
    "TokenLogprob",
    "TokenPrompt",
    "Topic",
    "Unloaded",
    "Unsupported",
    "Usage",
]

ProgressSink = Callable[[Progress], None]


class Generation(Protocol):
    """A running request, seen from the event loop; used by one task there.

    Iterating yields what was asked for and merges what the reader was too slow to take: texts of one channel are
    joined, of progress only the newest is kept. The iterator ends when the request has ended, however it ended.
    """

    def __aiter__(self) -> AsyncIterator[Delta | Progress]: ...

    async def result(self) -> GenerationResult:
        """Waits for the end. Raises an `OmlxError`: `Cancelled` carries what was generated so far."""
        ...

    def cancel(self, reason: str | None = None) -> None:
        """Asks for the end; the request ends within one step. Idempotent, and harmless after the end."""
        ...


class Subscription(Protocol):
    """Events on their way to one client. They wait in a bounded queue that drops the oldest when nobody takes them."""

    id: str

    def __aiter__(self) -> AsyncIterator[tuple[DaemonEvent, int]]:
        """Each event, and how many were dropped before it. Ends after `close`."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """All that `rpc/` asks of the daemon. Called on the event loop; nothing here blocks it.

    Every coroutine may be cancelled, which gives up waiting (and the work itself where nobody else waits for it).
    Every method may raise an `OmlxError`; any other exception is a bug and reaches the client as an internal error.
    """

    def info(self) -> DaemonInfo: ...

    def status(self) -> DaemonStatus: ...

    def request_shutdown(self, grace_s: float | None) -> None:
        """Starts the drain and returns at once."""
        ...

    async def reload(self) -> Reloaded:
        """Reads the settings again and applies what a running daemon can take up. Raises StorageFailed."""
        ...

    async def list_models(self) -> Sequence[ModelEntry]: ...

    async def load_model(self, model: str, options: LoadOptions, progress: ProgressSink) -> ModelEntry: ...

    async def unload_model(self, model: str, *, now: bool) -> Unloaded: ...

    async def pull_model(self, source: str, name: str | None, progress: ProgressSink) -> ModelEntry: ...

    async def pin_model(self, model: str, *, pinned: bool) -> ModelEntry:
        """A pinned model is never unloaded to make room. Raises Unsupported to pin one that is not loaded."""
        ...

    async def remove_model(self, model: str) -> int:
        """Deletes a model that was pulled; returns its bytes. Raises Unsupported, ModelBusy while it is loaded."""
        ...

    def memory_status(self) -> MemoryStatus: ...

    def set_memory(
        self, tier: Literal["safe", "balanced", "aggressive"] | None, limit_bytes: int | None
    ) -> MemoryStatus:
        """Exactly one of the two; a tier ends a limit in bytes. It may lie below what is used: the ladder starts."""
        ...

    def generate(self, request: GenerateRequest) -> Generation:
        """Starts a request. Refusals too arrive through `Generation.result`."""
        ...

    async def tokenize(self, model: str, prompt: Prompt) -> Sequence[int]: ...

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str: ...

    def metrics(self) -> DaemonMetrics: ...

    def subscribe(self, topics: Collection[Topic]) -> Subscription:
        """Events of these topics from now on, until the subscription is closed."""
        ...

    async def cache_stats(self, model: str | None) -> Sequence[CacheLine]:
        """One line for each model that has a prefix cache, loaded or not; of one model, if it is named."""
        ...

    async def explain_cache(self, model: str, prompt: Prompt) -> CacheExplanation: ...

    async def clear_cache(self, model: str | None, tier: CacheTier) -> int:
        """Drops what is stored, for one model or for all; returns the bytes that came free."""
        ...

    async def inspect_cache(self, model: str, limit: int, session: str | None) -> Sequence[CacheNode]:
        """At most `limit` nodes of the model's prefix tree, those used last first; of a session, what it holds."""
        ...

    async def verify_cache(self, model: str | None) -> CacheVerified: ...

    async def save_session(
        self, model: str, name: str, prompt: Prompt, *, replace: bool, progress: ProgressSink
    ) -> SessionEntry:
        """Raises SessionExists unless `replace`, Unsupported without a tier on disk, StorageFailed."""
        ...

    async def list_sessions(self, model: str | None) -> Sequence[SessionEntry]: ...

    async def delete_session(self, model: str, name: str) -> SessionEntry:
        """Raises SessionNotFound, as export does."""
        ...

    async def export_session(self, model: str, name: str, path: str) -> SessionEntry:
        """Writes the session as a new file; its bytes are the file's."""
        ...

    async def import_session(self, model: str, name: str, path: str) -> SessionEntry:
        """Raises SessionExists, Unsupported for a file that is not such a session of this model, StorageFailed."""
        ...
