"""The error tree: every failure that a client is told about, and the one that it is not.

Standard library only. Everyone imports these names from `engine.api`, which is the hinge between the rooms;
`rpc/errors.py` gives each its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from omlxd.engine.generation import GenerationResult, Json


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
