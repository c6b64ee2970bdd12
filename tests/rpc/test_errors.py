"""One table: every failure has its code and its kind."""

from __future__ import annotations

from collections.abc import Iterator

from omlxd.engine import api
from omlxd.rpc.errors import CODES, code_for, of_failure

PROTOCOL = {
    "invalid_params": -32602,
    "model_not_found": -32010,
    "model_load_failed": -32011,
    "memory_exceeded": -32012,
    "queue_full": -32013,
    "context_too_long": -32014,
    "invalid_grammar": -32015,
    "session_not_found": -32016,
    "session_exists": -32017,
    "shutting_down": -32018,
    "model_busy": -32019,
    "engine_failed": -32020,
    "unsupported": -32021,
    "storage_failed": -32022,
    "cancelled": -32800,
}


def failures(base: type[api.OmlxError] = api.OmlxError) -> Iterator[type[api.OmlxError]]:
    for failure in base.__subclasses__():
        yield failure
        yield from failures(failure)


def test_every_failure_has_the_code_that_the_protocol_gives_its_kind() -> None:
    own = [failure for failure in failures() if failure.__name__ in api.__all__]
    assert own
    assert {failure.kind: CODES[failure] for failure in own}.items() <= PROTOCOL.items()


def test_a_failure_tells_its_kind_and_its_fields() -> None:
    body = of_failure(api.ContextTooLong(9120, 8192))
    assert (body.code, body.data) == (-32014, {"kind": "context_too_long", "tokens": 9120, "limit": 8192})
    assert "9120" in body.message
    assert "8192" in body.message


def test_a_more_special_failure_has_its_base_code() -> None:
    class Later(api.Unsupported):
        """A failure that a later issue brings."""

    assert code_for(Later("x", "y")) == -32021
