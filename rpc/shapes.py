"""The wire's parameters and results as Python's type checkers see them: plain dicts with known keys.

Types only; the clients import this while types are checked and never at run time, a program where it wants to annotate
its own variables. `rpc.params` and `rpc.wire` are what the daemon checks with, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

Channel = Literal["content", "reasoning", "tool_call"]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
Phase = Literal["queued", "held", "download", "load", "fetch", "prefill"]
ModelState = Literal["ABSENT", "LOADING", "READY", "BUSY", "DRAINING", "UNLOADING", "FAILED"]
Message = Mapping[str, Any]
Tool = Mapping[str, Any]


class Thinking(TypedDict, total=False):
    """Whether, and how long, the model may reason."""

    enabled: bool
    budget_tokens: int | None
    stop: bool


class GenerateOptions(TypedDict, total=False):
    """The generation parameters; what is left out is the model's or the daemon's default."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[str, float] | None
    seed: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    response_format: Mapping[str, Any] | None
    thinking: Thinking | None
    return_token_ids: bool | None
    priority: Literal["interactive", "batch"] | None
    session: str | None
    cache: bool | None
    autoload: bool | None


class ChatOptions(GenerateOptions, total=False):
    """What `chat` takes beside model and messages."""

    tools: Sequence[Tool] | None
    tool_choice: Any
    chat_template_kwargs: Mapping[str, Any] | None


class CompleteOptions(GenerateOptions, total=False):
    """What `complete` takes beside model and prompt."""

    suffix: str | None


class LoadOptions(TypedDict, total=False):
    """What `load` takes beside the model."""

    pin: bool | None
    ttl_s: float | None
    draft: str | None
    kv_bits: Literal[2, 3, 4, 5, 6, 8] | None
    adapter: str | None


class TopLogprob(TypedDict):
    """One of the likeliest tokens at a position."""

    token_id: int
    text: str
    logprob: float


class LogprobEntry(TopLogprob):
    """One generated token and the likeliest ones in its place."""

    top: list[TopLogprob]


class Delta(TypedDict):
    """A piece of an answer; `seq` counts from 0 without gaps."""

    kind: Literal["delta"]
    seq: int
    text: str
    channel: Channel
    token_ids: NotRequired[list[int]]
    logprobs: NotRequired[list[LogprobEntry]]


class Progress(TypedDict):
    """How far a request has come: `done` of `total` bytes for download and load, tokens otherwise."""

    kind: Literal["progress"]
    phase: Phase
    done: int
    total: int
    detail: NotRequired[str]


class Usage(TypedDict):
    """Token counts of one request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int


class Timings(TypedDict):
    """Where the time of one request went."""

    queue_ms: float
    fetch_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    tokens_per_s: float
    mask_ms: float


class MalformedCall(TypedDict):
    """What the model wrote where a tool call should be, and why it is none."""

    text: str
    reason: str


class Generated(TypedDict):
    """What a generation made."""

    model: str
    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    malformed_calls: NotRequired[list[MalformedCall]]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    logprobs: NotRequired[list[LogprobEntry]]


class ModelLine(TypedDict):
    """One entry of `models.list`. Times are Unix seconds."""

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
    error: NotRequired[str | None]
    note: NotRequired[str | None]


class UnloadedLine(ModelLine):
    """The entry of an unloaded model, and what unloading gave back."""

    freed_bytes: int


class DaemonInfo(TypedDict):
    """Who answers."""

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
    protocol: int


class RequestInfo(TypedDict):
    """One live request."""

    id: str
    model: str
    state: str
    prompt_tokens: int
    computed_tokens: int
    completion_tokens: int
    age_s: float
    reason: str | None
    priority: Literal["interactive", "batch"]


class Status(TypedDict):
    """Everything in one reading."""

    info: DaemonInfo
    models: list[ModelLine]
    requests: list[RequestInfo]
    counts: dict[str, int]
    memory: dict[str, Any]
    cache: dict[str, Any]


class Tokens(TypedDict):
    """Token ids and their number."""

    tokens: list[int]
    count: int


class Detokenized(TypedDict):
    """The text of token ids."""

    text: str


OnProgress = Callable[[Progress], None]
