"""The methods: one table from a name to its parameters, its result and the function that answers it.

Stateless; everything a method needs comes with its call. `takes_time` methods run beside each other, in tasks of their
own, and can be cancelled; the others answer before the connection reads on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Raw, Struct

from omlxd.engine.api import CacheLine, CacheVerified, DaemonInfo, InvalidParams, MemoryStatus, Reloaded, SessionEntry
from omlxd.rpc import caching, sessions, watching, wire
from omlxd.rpc import params as p
from omlxd.rpc.calls import Call
from omlxd.rpc.discover import Described, document
from omlxd.rpc.errors import ErrorBody, method_not_found
from omlxd.rpc.generation import chat, complete
from omlxd.rpc.params import NoParams
from omlxd.rpc.progress import with_progress

Handler = Callable[[Call, Any], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the table. A handler returns the result, or an ErrorBody, or raises an OmlxError."""

    name: str
    summary: str
    params: type[Struct]
    result: Any
    handler: Handler
    takes_time: bool = False


async def _ping(call: Call, params: NoParams) -> str:
    return "pong"


async def _discover(call: Call, params: NoParams) -> Raw:
    return document(call.backend.info().version, described())


async def _info(call: Call, params: NoParams) -> DaemonInfo:
    return call.backend.info()


async def _status(call: Call, params: NoParams) -> wire.Status:
    return wire.status(call.backend.status())


async def _reload(call: Call, params: NoParams) -> Reloaded:
    return await call.wait_for(call.backend.reload)


async def _shutdown_daemon(call: Call, params: p.ShutdownParams) -> bool:
    call.backend.request_shutdown(params.grace_s)
    return True


async def _initialize(call: Call, params: p.AnyParams) -> wire.Initialized:
    call.client.is_initialized = True
    return wire.Initialized({}, wire.ServerInfo("omlxd", call.backend.info().version))


async def _nothing(call: Call, params: p.AnyParams) -> None:
    return None


async def _shutdown_client(call: Call, params: p.AnyParams) -> ErrorBody | None:
    """LSP's farewell, which must not be mistaken for the daemon's end."""
    if not call.client.is_initialized:
        return method_not_found("shutdown", "daemon.shutdown stops the daemon")
    return None


async def _exit(call: Call, params: p.AnyParams) -> None:
    call.client.leave()


async def _cancel(call: Call, params: p.CancelParams) -> bool:
    """Whether something was stopped."""
    if (params.id is None) == (params.token is None):
        raise InvalidParams("id", "give exactly one of id and token")
    return call.client.cancel(key=params.id, token=params.token)


async def _list_models(call: Call, params: NoParams) -> list[wire.ModelLine]:
    entries = await call.wait_for(call.backend.list_models)
    return [wire.model_line(entry) for entry in entries]


async def _load(call: Call, params: p.LoadParams) -> wire.ModelLine:
    backend = call.backend
    entry = await with_progress(call, lambda sink: backend.load_model(params.model, params.options(), sink))
    return wire.model_line(entry)


async def _unload(call: Call, params: p.UnloadParams) -> wire.UnloadedLine:
    unloaded = await call.wait_for(lambda: call.backend.unload_model(params.model, now=bool(params.now)))
    return wire.unloaded_line(unloaded)


async def _pin(call: Call, params: p.ModelParams) -> wire.ModelLine:
    return wire.model_line(await call.wait_for(lambda: call.backend.pin_model(params.model, pinned=True)))


async def _unpin(call: Call, params: p.ModelParams) -> wire.ModelLine:
    return wire.model_line(await call.wait_for(lambda: call.backend.pin_model(params.model, pinned=False)))


async def _remove(call: Call, params: p.ModelParams) -> wire.Removed:
    return wire.Removed(await call.wait_for(lambda: call.backend.remove_model(params.model)))


async def _memory(call: Call, params: NoParams) -> MemoryStatus:
    return call.backend.memory_status()


async def _set_memory(call: Call, params: p.MemorySetParams) -> MemoryStatus:
    return call.backend.set_memory(params.tier, params.limit_bytes)


async def _pull(call: Call, params: p.PullParams) -> wire.ModelLine:
    backend = call.backend
    entry = await with_progress(call, lambda sink: backend.pull_model(params.source, params.name, sink))
    return wire.model_line(entry)


async def _tokenize(call: Call, params: p.TokenizeParams) -> wire.Tokens:
    prompt = params.prompt()
    tokens = await call.wait_for(lambda: call.backend.tokenize(params.model, prompt))
    return wire.Tokens(tokens, len(tokens))


async def _detokenize(call: Call, params: p.DetokenizeParams) -> wire.Detokenized:
    text = await call.wait_for(lambda: call.backend.detokenize(params.model, params.tokens))
    return wire.Detokenized(text)


def described() -> list[Described]:
    """Every method, as the OpenRPC document has it."""
    return [_described(method) for method in METHODS.values()]


def _described(method: Method) -> Described:
    return Described(method.name, method.summary, method.params, method.result, method.takes_time)


_TABLE: Final = (
    Method("ping", "Answers pong.", NoParams, str, _ping),
    Method("rpc.discover", "This document.", NoParams, dict[str, Any], _discover),
    Method("daemon.info", "Who answers: versions, paths, device.", NoParams, DaemonInfo, _info),
    Method("daemon.status", "Models, requests, memory and cache in one reading.", NoParams, wire.Status, _status),
    Method("daemon.metrics", "Counters and histograms.", p.MetricsParams, wire.Metrics | str, watching.metrics),
    Method("daemon.reload", "Applies what changed in the settings.", NoParams, Reloaded, _reload, takes_time=True),
    Method("daemon.shutdown", "Drains for grace_s and exits.", p.ShutdownParams, bool, _shutdown_daemon),
    Method(
        "initialize", "Greets an LSP client; there are no capabilities.", p.AnyParams, wire.Initialized, _initialize
    ),
    Method("initialized", "LSP's second greeting, a notification.", p.AnyParams, None, _nothing),
    Method("shutdown", "LSP's farewell, for a client that initialized.", p.AnyParams, None, _shutdown_client),
    Method("exit", "Closes this connection, and nothing else.", p.AnyParams, None, _exit),
    Method("cancel", "Stops a running request of this connection, by id or token.", p.CancelParams, bool, _cancel),
    Method("$/cancelRequest", "The same, as LSP's notification.", p.CancelParams, bool, _cancel),
    Method("models.list", "The whole catalog.", NoParams, list[wire.ModelLine], _list_models, takes_time=True),
    Method("models.load", "Loads a model.", p.LoadParams, wire.ModelLine, _load, takes_time=True),
    Method("models.unload", "Unloads a model.", p.UnloadParams, wire.UnloadedLine, _unload, takes_time=True),
    Method("models.pin", "Never unloads it to make room.", p.ModelParams, wire.ModelLine, _pin, takes_time=True),
    Method("models.unpin", "Ends a pin.", p.ModelParams, wire.ModelLine, _unpin, takes_time=True),
    Method("models.remove", "Deletes a model that was pulled.", p.ModelParams, wire.Removed, _remove, takes_time=True),
    Method("memory.status", "Who holds memory, what limits it, what was done.", NoParams, MemoryStatus, _memory),
    Method("memory.set", "Another tier or limit.", p.MemorySetParams, MemoryStatus, _set_memory),
    Method("models.pull", "Fetches or imports a model.", p.PullParams, wire.ModelLine, _pull, takes_time=True),
    Method("generate.chat", "Continues a conversation.", p.ChatParams, wire.Generated, chat, takes_time=True),
    Method("generate.complete", "Continues a text.", p.CompleteParams, wire.Generated, complete, takes_time=True),
    Method("tokenize", "Text or messages to token ids.", p.TokenizeParams, wire.Tokens, _tokenize, takes_time=True),
    Method(
        "cache.stats", "What the prefix caches did and hold.", p.CacheStatsParams, list[CacheLine], caching.stats, True
    ),
    Method(
        "cache.explain", "Why a prompt would hit or miss.", p.CachePromptParams, wire.Explained, caching.explain, True
    ),
    Method("cache.warm", "Computes and stores a prompt.", p.CacheWarmParams, wire.Warmed, caching.warm, True),
    Method("cache.clear", "Drops what is stored.", p.CacheClearParams, wire.Cleared, caching.clear, True),
    Method("cache.inspect", "The prefix tree.", p.CacheInspectParams, wire.Inspected, caching.inspect, True),
    Method("cache.verify", "Reads every file on disk.", p.SessionsParams, CacheVerified, caching.verify, True),
    Method("sessions.save", "Names a stored prompt.", p.SessionSaveParams, wire.SessionSaved, sessions.save, True),
    Method("sessions.list", "All sessions.", p.SessionsParams, list[SessionEntry], sessions.listed, True),
    Method("sessions.delete", "Forgets a name.", p.SessionParams, SessionEntry, sessions.delete, True),
    Method("sessions.export", "One file of it.", p.SessionFileParams, wire.SessionSaved, sessions.export, True),
    Method("sessions.import", "One from a file.", p.SessionFileParams, wire.SessionSaved, sessions.import_, True),
    Method("events.subscribe", "Sends events from now on.", p.SubscribeParams, str, watching.subscribe),
    Method("detokenize", "Token ids to text.", p.DetokenizeParams, wire.Detokenized, _detokenize, takes_time=True),
)
METHODS: Final[dict[str, Method]] = {method.name: method for method in _TABLE}
