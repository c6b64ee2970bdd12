"""`memory.*`, and what pins and removes models, over a real wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omlxd.rpc.client import Client, RpcError
from tests.fakes import FakeBackend, serving_in_thread


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def client(backend: FakeBackend, tmp_path: Path) -> Iterator[Client]:
    path = tmp_path / "s"
    with serving_in_thread(backend, path), Client.connect(str(path)) as connected:
        yield connected


def test_the_status_names_holders_limits_and_what_was_done(client: Client) -> None:
    status = client.call("memory.status")
    assert set(status) == {
        "footprint_bytes", "ledger_bytes", "pool_bytes", "difference_bytes", "level", "limits", "ceilings", "binding",
        "tier", "entries", "actions",
    }  # fmt: skip
    assert set(status["limits"]) == {"soft", "hard", "abort"}
    assert set(status["ceilings"]) == {"static", "dynamic", "metal"}
    assert status["entries"][0] == {"owner": "tiny", "kind": "weights", "bytes": 8 * 10**9}
    assert set(status["actions"][0]) == {"at", "what", "why", "bytes"}


def test_another_limit_is_in_force_at_once(client: Client) -> None:
    assert client.call("memory.set", {"limit_bytes": 10**10})["tier"] == "custom"
    assert client.call("memory.status")["ceilings"]["static"] == 10**10
    assert client.call("memory.set", {"tier": "safe"})["tier"] == "safe"


@pytest.mark.parametrize(
    ("params", "field"), [({"tier": "bold"}, "tier"), ({"limit_bytes": 0}, "limit_bytes"), ({"limit": 1}, "limit")]
)
def test_what_is_no_limit_is_refused_by_name(client: Client, params: dict[str, Any], field: str) -> None:
    with pytest.raises(RpcError) as caught:
        client.call("memory.set", params)
    assert (caught.value.code, caught.value.data["field"]) == (-32602, field)


def test_models_are_pinned_unpinned_and_removed(client: Client, backend: FakeBackend) -> None:
    assert client.call("models.pin", {"model": "tiny"})["pinned"]
    assert not client.call("models.unpin", {"model": "tiny"})["pinned"]
    assert client.call("models.remove", {"model": "tiny"}) == {"removed_bytes": 1000}
    for method in ("models.pin", "models.unpin", "models.remove"):
        with pytest.raises(RpcError) as caught:
            client.call(method, {"model": "tiny"})
        assert caught.value.data["kind"] == "model_not_found"
