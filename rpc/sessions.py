"""The methods about sessions. On the event loop; saving one computes what is not stored yet, and tells its progress."""

from __future__ import annotations

from collections.abc import Sequence

from omlxd.engine.api import SessionEntry
from omlxd.rpc import params as p
from omlxd.rpc import wire
from omlxd.rpc.calls import Call
from omlxd.rpc.progress import with_progress


async def save(call: Call, params: p.SessionSaveParams) -> wire.SessionSaved:
    prompt, replace = params.as_prompt(), bool(params.replace)
    entry = await with_progress(
        call,
        lambda sink: call.backend.save_session(params.model, params.name, prompt, replace=replace, progress=sink),
    )
    return wire.session_saved(entry)


async def listed(call: Call, params: p.SessionsParams) -> Sequence[SessionEntry]:
    return await call.wait_for(lambda: call.backend.list_sessions(params.model))


async def delete(call: Call, params: p.SessionParams) -> SessionEntry:
    return await call.wait_for(lambda: call.backend.delete_session(params.model, params.name))


async def export(call: Call, params: p.SessionFileParams) -> wire.SessionSaved:
    entry = await call.wait_for(lambda: call.backend.export_session(params.model, params.name, params.path))
    return wire.session_saved(entry)


async def import_(call: Call, params: p.SessionFileParams) -> wire.SessionSaved:
    entry = await call.wait_for(lambda: call.backend.import_session(params.model, params.name, params.path))
    return wire.session_saved(entry)
