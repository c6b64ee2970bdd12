"""What goes out: the results and notifications of PROTOCOL.md as msgspec structs, made from the engine's values.

Stateless. Imports neither anyio nor jsonrpcserver, so that a client may use these types. Fields that PROTOCOL.md marks
with a question mark are left out when there is nothing to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from omlxd.engine.api import (
    CacheExplanation,
    CacheNode,
    CacheReason,
    Channel,
    DaemonEvent,
    DaemonInfo,
    DaemonMetrics,
    DaemonStatus,
    Delta,
    Difference,
    FinishReason,
    GenerationResult,
    MalformedCall,
    ModelEntry,
    ModelMetrics,
    ModelState,
    Phase,
    Progress,
    RequestInfo,
    SessionEntry,
    Timings,
    TokenLogprob,
    Topic,
    Unloaded,
    Usage,
)

encode: Final = msgspec.json.Encoder().encode


class ModelLine(Struct, kw_only=True, omit_defaults=True):
    """One entry of `models.list`."""

    name: str
    path: str
    kind: str
    state: ModelState
    size_bytes: int
    pinned: bool
    ttl_s: float | None
    loaded_at: float | None
    last_used: float | None
    requests: int
    error: str | None = None
    note: str | None = None


class UnloadedLine(ModelLine, kw_only=True, omit_defaults=True):
    """The entry of an unloaded model, and what unloading gave back."""

    freed_bytes: int


class Status(Struct, kw_only=True):
    """`daemon.status`."""

    info: DaemonInfo
    models: list[ModelLine]
    requests: Sequence[RequestInfo]
    counts: Mapping[str, int]
    memory: Mapping[str, Any]
    cache: Mapping[str, Any]


class TopLogprob(Struct):
    """One of the likeliest tokens at a position."""

    token_id: int
    text: str
    logprob: float


class LogprobEntry(Struct):
    """One generated token and the likeliest ones in its place."""

    token_id: int
    text: str
    logprob: float
    top: list[TopLogprob]


class Generated(Struct, kw_only=True):
    """The generation result; also `partial` of a cancelled one."""

    model: str
    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    reasoning: str | UnsetType = UNSET
    tool_calls: Sequence[Mapping[str, Any]] | UnsetType = UNSET
    malformed_calls: Sequence[MalformedCall] | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    logprobs: list[LogprobEntry] | UnsetType = UNSET


class DeltaValue(Struct, tag_field="kind", tag="delta"):
    """What a `$/progress` of a streamed answer carries; `seq` counts from 0 without gaps."""

    seq: int
    text: str
    channel: Channel
    token_ids: Sequence[int] | UnsetType = UNSET
    logprobs: list[LogprobEntry] | UnsetType = UNSET


class ProgressValue(Struct, tag_field="kind", tag="progress"):
    """What a `$/progress` of a request that takes time carries."""

    phase: Phase
    done: int
    total: int
    detail: str | UnsetType = UNSET


class Tokens(Struct):
    """`tokenize`."""

    tokens: Sequence[int]
    count: int


class Detokenized(Struct):
    """`detokenize`."""

    text: str


class HistogramLine(Struct):
    """`counts[i]` values are at most `bounds[i]` and over the bound before; the last count has no bound."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float
    count: int


class ModelMetricsLine(Struct):
    """What one model has done since the daemon started, under every load of it."""

    counters: Mapping[str, int]
    histograms: Mapping[str, HistogramLine]


class Metrics(Struct):
    """`daemon.metrics`; `requests` counts by outcome."""

    gauges: Mapping[str, float]
    requests: Mapping[str, int]
    models: Mapping[str, ModelMetricsLine]


class EventValue(Struct, omit_defaults=True):
    """What an `event` notification has in any topic; the topic's own fields stand beside these.

    `dropped` counts the subscription's events that were lost right before this one, because the client read too slowly.
    """

    topic: Topic
    subscription: str
    at: float
    dropped: int = 0


class Explained(Struct):
    """`cache.explain`."""

    prompt_tokens: int
    matched_tokens: int
    reason: CacheReason
    differs_at: Difference | UnsetType = UNSET


class Warmed(Struct):
    """`cache.warm`."""

    prompt_tokens: int
    cached_tokens: int


class Node(Struct, kw_only=True):
    """One node of `cache.inspect`."""

    key: str
    parent: str
    start: int
    tokens: int
    checkpoint: bool
    hot: bool
    ssd: bool
    bytes: int
    last_used: float | None
    pins: int
    text_preview: str | UnsetType = UNSET


class Inspected(Struct):
    """`cache.inspect`."""

    nodes: list[Node]


class SessionSaved(Struct):
    """`sessions.save`, `sessions.export` and `sessions.import`."""

    name: str
    tokens: int
    bytes: int


class Cleared(Struct):
    """`cache.clear`."""

    freed_bytes: int


class Removed(Struct):
    """`models.remove`."""

    removed_bytes: int


class ServerInfo(Struct):
    """Who answers, in LSP's words."""

    name: str
    version: str


class Initialized(Struct):
    """What an LSP server without capabilities answers to `initialize`."""

    capabilities: dict[str, Any]
    serverInfo: ServerInfo


class Extras(Struct, frozen=True):
    """What the client asked for beyond the text."""

    token_ids: bool = False
    logprobs: bool = False


def model_line(entry: ModelEntry) -> ModelLine:
    return msgspec.convert(entry, ModelLine, from_attributes=True)


def unloaded_line(unloaded: Unloaded) -> UnloadedLine:
    line = msgspec.structs.asdict(model_line(unloaded.entry))
    return UnloadedLine(**line, freed_bytes=unloaded.freed_bytes)


def node(each: CacheNode) -> Node:
    return Node(
        key=each.key,
        parent=each.parent,
        start=each.start,
        tokens=each.tokens,
        checkpoint=each.is_checkpoint,
        hot=each.hot,
        ssd=each.ssd,
        bytes=each.bytes,
        last_used=each.last_used,
        pins=each.pins,
        text_preview=UNSET if each.text_preview is None else each.text_preview,
    )


def session_saved(entry: SessionEntry) -> SessionSaved:
    return SessionSaved(entry.name, entry.tokens, entry.bytes)


def status(reading: DaemonStatus) -> Status:
    return Status(
        info=reading.info,
        models=[model_line(entry) for entry in reading.models],
        requests=reading.requests,
        counts=reading.counts,
        memory=reading.memory,
        cache=reading.cache,
    )


def metrics(read: DaemonMetrics) -> Metrics:
    return Metrics(read.gauges, read.requests, {name: _model_metrics(model) for name, model in read.models.items()})


def _model_metrics(model: ModelMetrics) -> ModelMetricsLine:
    histograms = {
        name: HistogramLine(each.bounds, each.counts, each.sum, each.count) for name, each in model.histograms.items()
    }
    return ModelMetricsLine(model.counters, histograms)


def explained(found: CacheExplanation) -> Explained:
    differs_at = UNSET if found.differs_at is None else found.differs_at
    return Explained(found.prompt_tokens, found.matched_tokens, found.reason, differs_at)


def event_notification(subscription: str, event: DaemonEvent, dropped: int) -> bytes:
    value = msgspec.to_builtins(EventValue(event.topic, subscription, event.at, dropped))
    return encode({"jsonrpc": "2.0", "method": "event", "params": {**value, **event.fields}})


def generated(result: GenerationResult, extras: Extras) -> Generated:
    return Generated(
        model=result.model,
        text=result.text,
        finish_reason=result.finish_reason,
        usage=result.usage,
        timings=result.timings,
        seed=result.seed,
        reasoning=UNSET if result.reasoning is None else result.reasoning,
        tool_calls=UNSET if result.tool_calls is None else result.tool_calls,
        malformed_calls=result.malformed_calls or UNSET,
        token_ids=result.token_ids if extras.token_ids else UNSET,
        prompt_token_ids=result.prompt_token_ids if extras.token_ids else UNSET,
        logprobs=_logprobs(result.logprobs or ()) if extras.logprobs else UNSET,
    )


def delta_value(delta: Delta, seq: int, extras: Extras) -> DeltaValue | None:
    """None where nothing of the delta was asked for: ids without text, for a client that wants text."""
    ids = delta.token_ids if extras.token_ids else UNSET
    logprobs = _logprobs(delta.logprobs) if extras.logprobs else UNSET
    if not delta.text and not ids and not logprobs:
        return None
    return DeltaValue(seq, delta.text, delta.channel, ids, logprobs)


def progress_value(progress: Progress) -> ProgressValue:
    detail = UNSET if progress.detail is None else progress.detail
    return ProgressValue(progress.phase, progress.done, progress.total, detail)


def notification_head(token: bytes) -> bytes:
    """The part of a `$/progress` that is the same for every value of one token; `notification` adds the rest."""
    return b'{"jsonrpc":"2.0","method":"$/progress","params":{"token":%b,"value":' % token


def notification(head: bytes, value: DeltaValue | ProgressValue) -> bytes:
    return b"%b%b}}" % (head, encode(value))


def _logprobs(entries: Sequence[TokenLogprob]) -> list[LogprobEntry]:
    return [
        LogprobEntry(
            entry.token_id,
            entry.text,
            entry.logprob,
            [TopLogprob(other.token_id, other.text, other.logprob) for other in entry.top],
        )
        for entry in entries
    ]
