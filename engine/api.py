"""The hinge between the rooms: requests, events, results, the protocols and the error tree.

Standard library only, so that `rpc/` can be written and tested without MLX. Every value is frozen and may be held by
any thread. `Backend` is all that `rpc/` asks of the rest of the daemon; `Generation` is one running request as the
event loop sees it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
Channel = Literal["content", "reasoning", "tool_call"]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
Phase = Literal["queued", "held", "download", "load", "fetch", "prefill"]
ModelState = Literal["ABSENT", "LOADING", "READY", "BUSY", "DRAINING", "UNLOADING", "FAILED"]
Topic = Literal["models", "memory", "requests", "cache"]
CacheTier = Literal["all", "hot", "ssd"]
CacheReason = Literal["full", "differs", "no_checkpoint", "evicted", "bad_block", "nothing_stored", "disabled"]

# ---------------------------------------------------------------------------------------------------------------------
# Requests


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation in OpenAI's chat shapes, already checked for structure; the model's template renders it."""

    messages: Sequence[Mapping[str, Json]]
    tools: Sequence[Mapping[str, Json]] = ()
    tool_choice: Json = None
    template_kwargs: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text, tokenized with the model's BOS and no template. `suffix` asks for fill-in-the-middle."""

    text: str
    suffix: str | None = None


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are."""

    token_ids: Sequence[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. None means: the model's generation_config, else the default PROTOCOL.md gives."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Stopping:
    """When an answer ends, besides the model's own EOS ids."""

    max_tokens: int = 512
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Thinking:
    """What the client asked of the model's reasoning."""

    enabled: bool = True
    budget_tokens: int | None = None
    stop: bool = False  # stop strings end the answer in the reasoning, too


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation, validated. `stream` asks for `Delta` events, `progress` for `Progress` events."""

    model: str
    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    logprobs: int = 0
    thinking: Thinking | None = None
    response_format: Mapping[str, Json] | None = None
    priority: Literal["interactive", "batch"] = "interactive"
    session: str | None = None
    cache: bool = True
    autoload: bool = True
    stream: bool = False
    progress: bool = False
    warm: bool = False  # compute and store the prompt, generate nothing


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is to be loaded."""

    pin: bool = False
    ttl_s: float | None = None
    draft: str | None = None
    kv_bits: int | None = None
    adapter: str | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Events and results


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability (natural log) and, for a generated token, its best alternatives."""

    token_id: int
    text: str
    logprob: float
    top: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that became final since the last delta, of one channel, with the ids and logprobs of the tokens it took.

    A delta may carry ids and no text (a character is not complete yet) and is then sent only where ids were asked for.
    """

    text: str
    channel: Channel = "content"
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request that takes time has come. `done` and `total` are bytes for download and load, else tokens."""

    phase: Phase
    done: int = 0
    total: int = 0
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one request went. `tokens_per_s` is the decode rate after the first token.

    `mask_ms` is what computing the masks of its grammar took, mostly while the device computed.
    """

    queue_ms: float = 0.0
    fetch_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    tokens_per_s: float = 0.0
    mask_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """What the model wrote where a tool call should be, and why it is none. The text is the answer's content, too."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What a request produced. Ids as PROTOCOL.md says: without the EOS or stop id that ended the answer."""

    model: str
    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings = field(default_factory=Timings)
    seed: int = 0
    reasoning: str | None = None
    tool_calls: Sequence[Mapping[str, Json]] | None = None
    malformed_calls: Sequence[MalformedCall] = ()
    token_ids: Sequence[int] = ()
    prompt_token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of `models.list`. Times are Unix seconds; `requests` counts live ones."""

    name: str
    path: str
    kind: str
    state: ModelState
    size_bytes: int
    pinned: bool = False
    ttl_s: float | None = None
    loaded_at: float | None = None
    last_used: float | None = None
    requests: int = 0
    error: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What unloading a model gave back."""

    entry: ModelEntry
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class DaemonInfo:
    """Who answers: the result of `daemon.info`."""

    version: str
    pid: int
    uptime_s: float
    home: str
    socket: str
    device: str
    platform: str
    mlx: str
    mlx_lm: str
    mlx_vlm: str
    protocol: int = 1


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What reading the settings again came to: the keys that are in force now, and those that wait for a restart."""

    applied: Sequence[str]
    needs_restart: Sequence[str]


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One live request as `daemon.status` shows it: `state` is a Request.state of DESIGN.md."""

    id: str
    model: str
    state: str
    prompt_tokens: int
    computed_tokens: int
    completion_tokens: int
    age_s: float
    reason: str | None = None
    priority: Literal["interactive", "batch"] = "interactive"


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """Everything in one reading: the result of `daemon.status`."""

    info: DaemonInfo
    models: Sequence[ModelEntry]
    requests: Sequence[RequestInfo]
    counts: Mapping[str, int]
    memory: Mapping[str, Json]
    cache: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Histogram:
    """How values were spread: `counts[i]` are at most `bounds[i]` and over the bound before; the last has no bound."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """What one model has done since the daemon started. Names that end in `_s` are in seconds."""

    counters: Mapping[str, int]
    histograms: Mapping[str, Histogram]


@dataclass(frozen=True, slots=True)
class DaemonMetrics:
    """The result of `daemon.metrics`: what is so now, how many requests came to what, and each model's own, by name."""

    gauges: Mapping[str, float]
    requests: Mapping[str, int]
    models: Mapping[str, ModelMetrics]


@dataclass(frozen=True, slots=True)
class DaemonEvent:
    """Something that happened. `at` is in Unix seconds; `fields` depend on the topic and never hold a text."""

    topic: Topic
    at: float
    fields: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class MemoryAction:
    """Something that was done about memory, or a level that was reached. `at` is in Unix seconds."""

    at: float
    what: str
    why: str
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """Who has how many bytes, and of which kind."""

    owner: str
    kind: str
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryMarks:
    """Work is admitted up to `soft`; above `hard` requests are preempted, above `abort` the newest prompt is ended."""

    soft: int
    hard: int
    abort: int


@dataclass(frozen=True, slots=True)
class MemoryCeilings:
    """What the settings, the machine as it is now, and the GPU allow; `metal` is None where there is no GPU."""

    static: int
    dynamic: int
    metal: int | None


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """The result of `memory.status`, in bytes.

    `difference_bytes` is what the footprint, without `pool_bytes` that MLX keeps for reuse, has and no entry names;
    negative where something is reserved and not there yet.
    """

    footprint_bytes: int
    ledger_bytes: int
    pool_bytes: int
    difference_bytes: int
    level: Literal["OK", "SOFT", "HARD"]
    limits: MemoryMarks
    ceilings: MemoryCeilings
    binding: Literal["static", "dynamic", "metal"]
    tier: Literal["safe", "balanced", "aggressive", "custom"]
    entries: Sequence[MemoryHolder]
    actions: Sequence[MemoryAction]


@dataclass(frozen=True, slots=True)
class PerTier:
    """One number for each tier of the cache."""

    hot: int = 0
    ssd: int = 0


@dataclass(frozen=True, slots=True)
class CacheLine:
    """One model's line of `cache.stats`: counts since the cache was opened, and what it holds now.

    A lookup that reuses no token is a miss. `tokens_computed` are prompt tokens that were not there and were computed.
    """

    model: str
    hits: int
    misses: int
    tokens_matched: int
    tokens_computed: int
    blocks: PerTier
    checkpoints: int
    bytes: PerTier
    evictions: int
    writes_dropped: int
    bad_blocks: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt leaves what is stored, with text from a little before on both sides."""

    token: int
    stored_text: str
    prompt_text: str


@dataclass(frozen=True, slots=True)
class CacheExplanation:
    """Why no more of a prompt would be reused than its first `matched_tokens`."""

    prompt_tokens: int
    matched_tokens: int
    reason: CacheReason
    differs_at: Difference | None = None


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """A session: `tokens` up to its position, `bytes` on disk that it holds; times in Unix seconds."""

    name: str
    model: str
    tokens: int
    bytes: int
    created_at: float
    last_used: float


@dataclass(frozen=True, slots=True)
class CacheNode:
    """One block or checkpoint of a prefix tree. `parent` is the key before it; `last_used` is known on disk only."""

    key: str
    parent: str
    start: int
    tokens: int
    is_checkpoint: bool
    hot: bool
    ssd: bool
    bytes: int
    last_used: float | None
    pins: int
    text_preview: str | None = None


@dataclass(frozen=True, slots=True)
class CacheVerified:
    """What checking every file on disk came to."""

    checked: int
    bad: int
    repaired: int


# ---------------------------------------------------------------------------------------------------------------------
# Protocols

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


# ---------------------------------------------------------------------------------------------------------------------
# Errors


class OmlxError(Exception):
    """A failure that a client is told about: a stable kind, fields for programs, a message for people."""

    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, **fields: Json) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, Json] = fields


class InvariantError(Exception):
    """Our own bookkeeping is broken. Never shown to a client as anything but an internal error; always loud."""


class InvalidParams(OmlxError):
    """A parameter is unknown, ill-typed or out of range."""

    kind = "invalid_params"

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason, field=field, reason=reason)


class ModelNotFound(OmlxError):
    """No model of that name, alias or path is known."""

    kind = "model_not_found"

    def __init__(self, model: str, did_you_mean: Sequence[str] = (), reason: str | None = None) -> None:
        hint = (
            f"; did you mean {', '.join(did_you_mean)}?" if did_you_mean else "; `omlxctl models` lists what there is"
        )
        super().__init__(reason or f"no model {model!r}{hint}", model=model, did_you_mean=list(did_you_mean))


class ModelLoadFailed(OmlxError):
    """The model is known and cannot be loaded."""

    kind = "model_load_failed"

    def __init__(self, model: str, reason: str, hint: str) -> None:
        super().__init__(f"cannot load {model!r}: {reason}; {hint}", model=model, reason=reason, hint=hint)


class MemoryExceeded(OmlxError):
    """The work would not fit in memory; refused before it was submitted."""

    kind = "memory_exceeded"

    def __init__(self, what: str, *, needed_bytes: int, limit_bytes: int, binding: str, advice: str) -> None:
        message = f"{what} needs {needed_bytes} bytes, the {binding} limit leaves {limit_bytes}; {advice}"
        super().__init__(message, needed_bytes=needed_bytes, limit_bytes=limit_bytes, binding=binding, advice=advice)


class QueueFull(OmlxError):
    """As many requests wait as are allowed to."""

    kind = "queue_full"

    def __init__(self, depth: int, retry_after_ms: int, *, waited_s: float | None = None) -> None:
        """`waited_s` is for a request that was let in and never got its turn."""
        what = f"{depth} requests already wait, the most allowed"
        if waited_s is not None:
            what = f"it waited {waited_s:.0f} s for its turn, the longest allowed"
        super().__init__(
            f"{what}; try again in {retry_after_ms} ms",
            depth=depth,
            retry_after_ms=retry_after_ms,
        )


class ContextTooLong(OmlxError):
    """The prompt leaves no room for one token in the model's context."""

    kind = "context_too_long"

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens, the model takes {limit} with at least one of them generated; shorten it",
            tokens=tokens,
            limit=limit,
        )


class ShuttingDown(OmlxError):
    """The daemon is stopping and takes no new work, or ended this request because its grace is over."""

    kind = "shutting_down"

    def __init__(self) -> None:
        super().__init__("the daemon is shutting down; send the request again when it is back")


class ModelBusy(OmlxError):
    """What was asked cannot be done while the model has live requests."""

    kind = "model_busy"

    def __init__(self, model: str, requests: int) -> None:
        super().__init__(
            f"{model!r} has {requests} live requests; wait for them or unload it with now",
            model=model,
            requests=requests,
        )


class EngineFailed(OmlxError):
    """The request died with its engine's step; other requests go on."""

    kind = "engine_failed"

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(
            f"the engine of {model!r} failed: {reason}; send the request again", model=model, reason=reason
        )


class InvalidGrammar(OmlxError):
    """What the answer is to be constrained to cannot be: it is wrong, or too large."""

    kind = "invalid_grammar"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the answer cannot be held to this response_format: {reason}", reason=reason)


class Unsupported(OmlxError):
    """Understood, and not something that this model or this daemon does."""

    kind = "unsupported"

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what} is not supported: {reason}", what=what, reason=reason)


class StorageFailed(OmlxError):
    """What was asked could not be written or read."""

    kind = "storage_failed"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}", path=path, reason=reason)


class SessionNotFound(OmlxError):
    """The model has no session of that name."""

    kind = "session_not_found"

    def __init__(self, model: str, name: str) -> None:
        super().__init__(
            f"{model!r} has no session {name!r}; sessions.list says which there are, sessions.save makes one", name=name
        )


class SessionExists(OmlxError):
    """The model has a session of that name already."""

    kind = "session_exists"

    def __init__(self, model: str, name: str) -> None:
        super().__init__(
            f"{model!r} has a session {name!r} already; save it with replace, or under another name", name=name
        )


class Cancelled(OmlxError):
    """The request was stopped before its end; `partial` is what it had by then, if it was a generation."""

    kind = "cancelled"

    def __init__(self, partial: GenerationResult | None = None, reason: str | None = None) -> None:
        super().__init__("the request was cancelled" + (f": {reason}" if reason else ""))
        self.partial = partial
        self.reason = reason
