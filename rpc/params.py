"""The parameters of every method, as the wire has them, and what they become for the rest of the daemon.

Stateless. Types are exact and ranges are in the types; every field says what it takes, for the OpenRPC document and for
the refusal of anything else. A null stands for the default wherever there is one.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from omlxd.engine.api import (
    CacheTier,
    ChatPrompt,
    GenerateRequest,
    InvalidParams,
    LoadOptions,
    Prompt,
    Sampling,
    Stopping,
    TextPrompt,
    Thinking,
    TokenPrompt,
    Topic,
)
from omlxd.rpc.messages import checked_messages, checked_tool_choice, checked_tools

MAX_SEED: Final = 2**63 - 1
MAX_STOPS: Final = 16
MAX_LOGPROBS: Final = 20
DEFAULT_MAX_TOKENS: Final = Stopping().max_tokens

Text = Annotated[str, Meta(min_length=1)]
TokenId = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Token = int | str
# An object's keys are strings; the schema made from the type alone would allow any.
Biases = Annotated[
    dict[TokenId, float], Meta(extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,17})$"}})
]


def _takes(text: str) -> Meta:
    """What a parameter takes, in words."""
    return Meta(description=text)


Model = Annotated[Text, _takes("a name or alias from models.list, or a path to a model directory")]
OptionalModel = Annotated[Text | None, _takes("a name or alias from models.list")]
Seconds = Annotated[Annotated[float, Meta(ge=0)] | None, _takes("seconds, 0 or more")]
Flag = Annotated[bool | None, _takes("true or false")]
Messages = Annotated[
    Annotated[list[dict[str, Any]], Meta(min_length=1)],
    _takes("a list of at least one message, in OpenAI's chat shape"),
]
OptionalMessages = Annotated[Messages | None, _takes("a list of messages in OpenAI's chat shape")]
OptionalPrompt = Annotated[
    str | Annotated[list[TokenId], Meta(min_length=1)] | None, _takes("a string, or a list of at least one token id")
]
OptionalText = Annotated[Text | None, _takes("a string of at least one character")]
OptionalToken = Annotated[Token | None, _takes("the token that $/progress is to carry: a string or an integer")]


class NoParams(Struct, forbid_unknown_fields=True):
    """Nothing."""


class AnyParams(Struct):
    """Whatever an LSP client sends along; none of it means anything here."""


class ShutdownParams(Struct, forbid_unknown_fields=True):
    """`daemon.shutdown`; without `grace_s` the settings' grace holds."""

    grace_s: Seconds = None


class CancelParams(Struct, forbid_unknown_fields=True):
    """`cancel` and `$/cancelRequest`: one of the two says which request."""

    id: Annotated[int | float | str | None, _takes("the id of a running request")] = None
    token: Annotated[Token | None, _takes("the token of a running request")] = None


class Slow(Struct, forbid_unknown_fields=True, kw_only=True):
    """What every request that takes time accepts."""

    stream: Flag = None
    workDoneToken: OptionalToken = None
    partialResultToken: OptionalToken = None


class LoadParams(Slow, kw_only=True):
    """`models.load`."""

    model: Model
    pin: Flag = None
    ttl_s: Seconds = None
    draft: OptionalText = None
    kv_bits: Annotated[Literal[2, 3, 4, 5, 6, 8] | None, _takes("2, 3, 4, 5, 6 or 8")] = None
    adapter: OptionalText = None

    def options(self) -> LoadOptions:
        return LoadOptions(
            pin=bool(self.pin), ttl_s=self.ttl_s, draft=self.draft, kv_bits=self.kv_bits, adapter=self.adapter
        )


class UnloadParams(Struct, forbid_unknown_fields=True, kw_only=True):
    """`models.unload`; `now` ends live requests instead of waiting for them."""

    model: Model
    now: Flag = None


class ModelParams(Struct, forbid_unknown_fields=True, kw_only=True):
    """`models.pin`, `models.unpin` and `models.remove`."""

    model: Model


class MemorySetParams(Struct, forbid_unknown_fields=True, kw_only=True):
    """`memory.set`: exactly one of the two; a tier ends a limit in bytes."""

    tier: Annotated[Literal["safe", "balanced", "aggressive"] | None, _takes("safe, balanced or aggressive")] = None
    limit_bytes: Annotated[Annotated[int, Meta(ge=1)] | None, _takes("bytes, 1 or more")] = None


class PullParams(Slow, kw_only=True):
    """`models.pull`."""

    source: Annotated[Text, _takes("demo, a Hugging Face repo id, a local directory or a .gguf file")]
    name: OptionalText = None


class TokenizeParams(Struct, forbid_unknown_fields=True, kw_only=True):
    """`tokenize`: raw text, or a conversation through the model's template."""

    model: Model
    text: Annotated[str | None, _takes("a string")] = None
    messages: Annotated[Messages | None, _takes("a list of messages in OpenAI's chat shape")] = None

    def prompt(self) -> Prompt:
        """Raises InvalidParams unless exactly one of the two is given."""
        if (self.text is None) == (self.messages is None):
            raise InvalidParams("text", "give exactly one of text and messages")
        if self.messages is not None:
            return ChatPrompt(checked_messages(self.messages))
        return TextPrompt(self.text or "")


class DetokenizeParams(Struct, forbid_unknown_fields=True, kw_only=True):
    """`detokenize`."""

    model: Model
    tokens: Annotated[list[TokenId], _takes("a list of token ids, each 0 or more")]


class MetricsParams(Struct, forbid_unknown_fields=True):
    """`daemon.metrics`."""

    format: Annotated[Literal["json", "prometheus"] | None, _takes("json or prometheus")] = None


class SubscribeParams(Struct, forbid_unknown_fields=True):
    """`events.subscribe`."""

    topics: Annotated[
        Annotated[list[Topic], Meta(min_length=1)], _takes("a list of models, memory, requests and cache, or some")
    ]


class CacheStatsParams(Struct, forbid_unknown_fields=True):
    """`cache.stats`; without `model`, of all that have been loaded."""

    model: OptionalModel = None


class CacheClearParams(Struct, forbid_unknown_fields=True):
    """`cache.clear`; without `model`, of all."""

    model: OptionalModel = None
    tier: Annotated[CacheTier | None, _takes("all, hot or ssd")] = None


class CachePromptParams(Struct, forbid_unknown_fields=True, kw_only=True):
    """`cache.explain`: a conversation, or a prompt as `generate.complete` takes it."""

    model: Model
    messages: OptionalMessages = None
    prompt: OptionalPrompt = None

    def as_prompt(self) -> Prompt:
        return _one_prompt(self.messages, self.prompt)


class CacheWarmParams(Slow, kw_only=True):
    """`cache.warm`: the same, with progress."""

    model: Model
    messages: OptionalMessages = None
    prompt: OptionalPrompt = None

    def as_prompt(self) -> Prompt:
        return _one_prompt(self.messages, self.prompt)


class CacheInspectParams(Struct, forbid_unknown_fields=True, kw_only=True):
    """`cache.inspect`; with `session`, only what it holds."""

    model: Model
    limit: Annotated[Annotated[int, Meta(ge=1, le=10_000)] | None, _takes("an integer from 1 to 10000")] = None
    session: OptionalText = None


class SessionsParams(Struct, forbid_unknown_fields=True):
    """`cache.verify` and `sessions.list`; without `model`, of all."""

    model: OptionalModel = None


SessionName = Annotated[Text, _takes("a name of at most 128 characters, none of them / \\ or a control character")]


class SessionSaveParams(CacheWarmParams, kw_only=True):
    """`sessions.save`."""

    name: SessionName
    replace: Flag = None


class SessionParams(Struct, forbid_unknown_fields=True, kw_only=True):
    """`sessions.delete`."""

    model: Model
    name: SessionName


class SessionFileParams(SessionParams, kw_only=True):
    """`sessions.export` and `sessions.import`."""

    path: Annotated[Text, _takes("an absolute path that ends in .safetensors")]


def _one_prompt(messages: list[dict[str, Any]] | None, prompt: str | list[int] | None) -> Prompt:
    """Raises InvalidParams unless exactly one of the two is given."""
    if (messages is None) == (prompt is None):
        raise InvalidParams("messages", "give exactly one of messages and prompt")
    if messages is not None:
        return ChatPrompt(checked_messages(messages))
    return TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt or ())


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that a schema accepts."""

    schema: dict[str, Any] | bool


class RegexFormat(Struct, tag_field="type", tag="regex", forbid_unknown_fields=True):
    """Text that a regular expression matches as a whole."""

    pattern: Text


class GrammarFormat(Struct, tag_field="type", tag="grammar", forbid_unknown_fields=True):
    """Text of a Lark grammar."""

    lark: Text


ResponseFormat = JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat


class ThinkingParams(Struct, forbid_unknown_fields=True):
    """Whether, and how long, the model may reason."""

    enabled: bool = True
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop: bool = False


class GenerateParams(Slow, kw_only=True):
    """The generation parameters, shared by chat and complete."""

    model: Model
    max_tokens: Annotated[Annotated[int, Meta(ge=1)] | None, _takes("an integer, 1 or more")] = None
    temperature: Annotated[Annotated[float, Meta(ge=0)] | None, _takes("a number, 0 (greedy) or more")] = None
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, _takes("a number over 0, up to 1 (off)")] = None
    top_k: Annotated[Annotated[int, Meta(ge=0)] | None, _takes("an integer, 0 (off) or more")] = None
    min_p: Annotated[Share | None, _takes("a number from 0 (off) to 1")] = None
    xtc_probability: Annotated[Share | None, _takes("a number from 0 (off) to 1")] = None
    xtc_threshold: Annotated[Annotated[float, Meta(ge=0, le=0.5)] | None, _takes("a number from 0 to 0.5")] = None
    repetition_penalty: Annotated[Annotated[float, Meta(gt=0)] | None, _takes("a number over 0; 1 is off")] = None
    presence_penalty: Annotated[Annotated[float, Meta(ge=-2, le=2)] | None, _takes("a number from -2 to 2")] = None
    frequency_penalty: Annotated[Annotated[float, Meta(ge=-2, le=2)] | None, _takes("a number from -2 to 2")] = None
    logit_bias: Annotated[Biases | None, _takes("an object from token ids, as strings, to numbers")] = None
    seed: Annotated[Annotated[int, Meta(ge=0, le=MAX_SEED)] | None, _takes(f"an integer from 0 to {MAX_SEED}")] = None
    stop: Annotated[
        Annotated[list[Text], Meta(max_length=MAX_STOPS)] | None,
        _takes(f"a list of at most {MAX_STOPS} strings, none of them empty"),
    ] = None
    stop_token_ids: Annotated[list[TokenId] | None, _takes("a list of token ids, each 0 or more")] = None
    ignore_eos: Flag = None
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None, _takes(f"an integer from 0 (off) to {MAX_LOGPROBS}")
    ] = None
    response_format: Annotated[
        ResponseFormat | None,
        _takes("{type: json_object}, {type: json_schema, schema}, {type: regex, pattern} or {type: grammar, lark}"),
    ] = None
    thinking: Annotated[
        ThinkingParams | None, _takes("{enabled, budget_tokens, stop}; with stop, stop strings end the reasoning too")
    ] = None
    return_token_ids: Flag = None
    priority: Annotated[Literal["interactive", "batch"] | None, _takes("interactive or batch")] = None
    session: OptionalText = None
    cache: Flag = None
    autoload: Flag = None

    def request(self, prompt: Prompt) -> GenerateRequest:
        return GenerateRequest(
            model=self.model,
            prompt=prompt,
            sampling=self._sampling(),
            stopping=self._stopping(),
            logprobs=self.logprobs or 0,
            thinking=_thinking(self.thinking),
            response_format=_mapping(self.response_format),
            priority=self.priority or "interactive",
            session=self.session,
            cache=self.cache is not False,
            autoload=self.autoload is not False,
            stream=bool(self.stream) or self.partialResultToken is not None,
            progress=bool(self.stream) or self.workDoneToken is not None,
        )

    def _sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
            seed=self.seed,
        )

    def _stopping(self) -> Stopping:
        return Stopping(
            max_tokens=self.max_tokens or DEFAULT_MAX_TOKENS,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
        )


class ChatParams(GenerateParams, kw_only=True):
    """`generate.chat`."""

    messages: Messages
    tools: Annotated[list[dict[str, Any]] | None, _takes("a list of tools in OpenAI's chat shape")] = None
    tool_choice: Annotated[Any, _takes("none, auto, required or {type: function, function: {name}}")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, _takes("an object")] = None

    def prompt(self) -> ChatPrompt:
        """Raises InvalidParams where a message or a tool has another shape than OpenAI's."""
        return ChatPrompt(
            messages=checked_messages(self.messages),
            tools=checked_tools(self.tools or ()),
            tool_choice=checked_tool_choice(self.tool_choice),
            template_kwargs=self.chat_template_kwargs or {},
        )


class CompleteParams(GenerateParams, kw_only=True):
    """`generate.complete`."""

    prompt: Annotated[
        str | Annotated[list[TokenId], Meta(min_length=1)], _takes("a string, or a list of at least one token id")
    ]
    suffix: Annotated[str | None, _takes("a string")] = None

    def as_prompt(self) -> Prompt:
        """Raises InvalidParams for a suffix to token ids: fill-in-the-middle is made of text."""
        if isinstance(self.prompt, str):
            return TextPrompt(self.prompt, self.suffix)
        if self.suffix is not None:
            raise InvalidParams("suffix", "goes with a prompt of text, not of token ids")
        return TokenPrompt(self.prompt)


def _thinking(given: ThinkingParams | None) -> Thinking | None:
    return None if given is None else Thinking(given.enabled, given.budget_tokens, given.stop)


def _mapping(given: ResponseFormat | None) -> dict[str, Any] | None:
    try:
        return None if given is None else msgspec.to_builtins(given)
    except RecursionError:
        raise InvalidParams("response_format", "is nested too deeply") from None
