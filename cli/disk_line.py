"""How the tier on disk is, in one line for people. Main thread only."""

from __future__ import annotations

from collections.abc import Mapping

from omlxd.cli.tables import size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_STATES = {
    "off": "off: cache.ssd.enabled is false",
    "closed": "not looked at yet: no model has been loaded",
    "opening": "being opened",
    "paused": "paused",
    "read_only": "read only",
}
_LOSSES = {
    "dropped": "not written",
    "bad": "bad",
    "incompatible": "of another version",
    "foreign": "not omlxd's",
}


def disk_line(cache: Mapping[str, Any]) -> str | None:
    """`cache` is that of `daemon.status`; None where it says nothing of a tier on disk."""
    disk = cache.get("ssd")
    if disk is None:
        return None
    state = _STATES.get(disk["state"])
    if disk["reason"] is not None:
        state = f"{state or disk['state']}: {disk['reason']}"
    if disk["state"] in ("off", "closed"):
        return state
    held = f"{size(cache['bytes']['ssd'])} of {size(cache['max_bytes']['ssd'])}"
    waits = f"{size(disk['queued_bytes'])} to be written" if disk["queued_bytes"] else None
    losses = [f"{disk['counts'][name]} {word}" for name, word in _LOSSES.items() if disk["counts"].get(name)]
    return "; ".join(each for each in (held, state, waits, ", ".join(losses)) if each)
