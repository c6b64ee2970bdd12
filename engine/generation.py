"""One generation as values: what is asked for, what is told while it runs, and what it came to.

Frozen, for any thread; standard library only. Everyone imports these names from `engine.api`, the hinge between the
rooms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
Channel = Literal["content", "reasoning", "tool_call"]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
Phase = Literal["queued", "held", "download", "load", "fetch", "prefill"]

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
class PromptPicture:
    """Tokens [start, stop) of a prompt stand for one picture, whose content has this digest."""

    start: int
    stop: int
    digest: bytes


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
    prompt_pictures: Sequence[PromptPicture] = ()
    logprobs: Sequence[TokenLogprob] | None = None
