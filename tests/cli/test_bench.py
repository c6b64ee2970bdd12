"""`omlxctl bench`: what it refuses, and what it leaves behind; its figures come from a real daemon and a tiny model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from omlxd.cli.bench_runs import Run, alone
from omlxd.cli.errors import CliError
from tests.cli.running import Home
from tests.cli.serving import Daemon
from tests.e2e.living import Daemon as Living
from tests.e2e.living import daemon_in_new_home
from tests.models import write

SMALL = ("--repeats", "1", "--tokens", "4", "--prompt-tokens", "40")
COMPARED = {"prefill", "decode_1", "decode_4", "decode_16", "cold", "p50", "p99"}
DAEMON_ONLY = {"warm", "busy_p50", "busy_p99"}


def states(living: Living) -> list[str]:
    return [entry["state"] for entry in living.call("models.list")]


def test_a_model_is_measured_through_the_daemon_and_with_mlx_lm_alone_and_is_loaded_by_neither_afterwards() -> None:
    with daemon_in_new_home() as living:
        write("llama", living.models / "tiny")
        living.start()
        outcome = living.home.run("bench", "tiny", "--json", *SMALL)
        assert states(living) == ["ABSENT"]
        table = living.home.run("bench", "tiny", "--no-compare", *SMALL)
        assert states(living) == ["READY"]
        refused = living.home.run("bench", "tiny", *SMALL)
    document = outcome.document
    figures = {figure["name"]: figure for figure in document["figures"]}
    assert (document["model"], document["alone_failed"]) == ("tiny", None)
    assert figures.keys() == COMPARED | DAEMON_ONLY
    for name in COMPARED:
        assert figures[name]["ratio"] == pytest.approx(figures[name]["value"] / figures[name]["alone"])
    assert {name for name, figure in figures.items() if figure["alone"] is None} == DAEMON_ONLY
    assert table.text.splitlines()[1].startswith("prefill, 40 tokens")
    assert refused.code == 1
    assert "--no-compare" in refused.errors[0]


def test_a_context_too_short_for_the_long_prompt_shortens_it() -> None:
    with daemon_in_new_home() as living:
        write("llama", living.models / "tiny", context=128)
        living.start()
        outcome = living.home.run("bench", "tiny", "--no-compare", "--json", *SMALL)
    assert "beside a prompt of 64, p50" in [figure["title"] for figure in outcome.document["figures"]]


def test_a_model_that_mlx_lm_cannot_load_is_reported_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"mlx-lm alone could not run the model: .*config\.json"):
        alone(str(tmp_path / "nothing"), [Run("prefill", [[1, 2]], 1)], lambda: None)


def test_numbers_that_measure_nothing_are_refused(home: Home, daemon: Daemon) -> None:
    outcome = home.run("bench", "tiny", "--tokens", "1")
    assert (outcome.code, outcome.errors) == (2, ["error: --tokens is at least 2, not 1"])


def test_a_model_that_others_use_is_not_measured(home: Home, daemon: Daemon) -> None:
    daemon.backend.models["tiny"] = replace(daemon.backend.models["tiny"], state="BUSY", requests=2)
    outcome = home.run("bench", "tiny")
    assert (outcome.code, outcome.errors) == (1, ["error: tiny has 2 live requests; measure it when they are done"])
