"""What the daemon says of itself, as values: models, requests, memory, the cache, events, counters.

Frozen, for any thread; standard library only. Everyone imports these names from `engine.api`, the hinge between the
rooms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from omlxd.engine.generation import Json

ModelState = Literal["ABSENT", "LOADING", "READY", "BUSY", "DRAINING", "UNLOADING", "FAILED"]
Topic = Literal["models", "memory", "requests", "cache"]
CacheTier = Literal["all", "hot", "ssd"]
CacheReason = Literal["full", "differs", "no_checkpoint", "evicted", "bad_block", "nothing_stored", "disabled"]


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
