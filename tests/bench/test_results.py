"""How a run's figures are judged, written down, and compared with another run's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.bench.compare import changes, read
from tests.bench.figures import Figure, from_json, to_json
from tests.bench.measures import MEASURES
from tests.bench.report import write_report


def ratio(value: float, *, name: str = "decode", better: str = "higher", target: float | None = 0.97) -> Figure:
    return Figure(name, "decode", "tokens/s", better, [value], "bare", [100.0], target=target)  # type: ignore[arg-type]


def results(*figures: Figure, processor: str = "one", measure: str = "throughput") -> dict[str, Any]:
    return {
        "schema": "omlxd-bench-1",
        "date": "2030-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "machine": {
            "system": "Linux",
            "processor": processor,
            "cores": 2,
            "python": "3.11",
            "openblas": True,
            "versions": {"mlx": "1"},
        },
        "quick": False,
        "failed": [],
        "measures": {measure: [to_json(figure) for figure in figures]},
    }


def worse(before: Figure, after: Figure, **machines: str) -> list[str]:
    found = changes(results(before), results(after, **machines), threshold=0.1)
    return [change.figure.name for change in found if change.counts and change.by > 0]


def test_a_figure_is_the_median_of_its_samples_over_that_of_its_reference() -> None:
    figure = Figure("a", "a", "ms", "lower", [9, 3, 1], "b", [2, 4, 2], target=1.5)
    assert (figure.value, figure.reference_value, figure.ratio, figure.met) == (3, 2, 1.5, True)


def test_a_target_is_a_floor_where_higher_is_better_and_a_ceiling_where_lower_is() -> None:
    assert ratio(97).met
    assert not ratio(96).met
    assert not ratio(98, better="lower").met
    assert Figure("a", "a", "ms", "lower", [5], target=5).met


def test_a_figure_comes_back_from_json_as_it_went_in() -> None:
    figure = Figure("a@5", "a", "ms", "lower", [1.5, 2.5], "b", [3.0], target=0.5, x=5)
    assert from_json(json.loads(json.dumps(to_json(figure)))) == figure


def test_a_regression_counts_from_the_threshold_on_in_the_direction_that_is_worse() -> None:
    assert worse(ratio(100), ratio(85)) == ["decode"]
    assert worse(ratio(100), ratio(95)) == []
    assert worse(ratio(100), ratio(120)) == []
    assert worse(ratio(100, better="lower"), ratio(120, better="lower")) == ["decode"]


def test_a_change_within_what_the_repeats_differ_by_does_not_count() -> None:
    steady = Figure("a", "a", "ms", "lower", [100, 101, 102])
    shaky = Figure("a", "a", "ms", "lower", [60, 130, 200])
    assert worse(steady, shaky) == []
    assert worse(steady, Figure("a", "a", "ms", "lower", [129, 130, 131])) == ["a"]


def test_on_another_machine_only_ratios_are_compared() -> None:
    alone = Figure("a", "a", "ms", "lower", [1])
    slower = Figure("a", "a", "ms", "lower", [2])
    assert worse(alone, slower) == ["a"]
    assert worse(alone, slower, processor="other") == []
    assert worse(ratio(100), ratio(50), processor="other") == ["decode"]


def test_what_is_no_run_is_refused_with_exit_code_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"schema": "else"}')
    for source in (str(tmp_path / "other.json"), "no-such-commit"):
        with pytest.raises(SystemExit) as ended:
            read(source)
        assert ended.value.code == 2
    assert "'else'" in capsys.readouterr().err


def test_a_report_is_a_page_a_document_and_plots_that_are_xml(tmp_path: Path) -> None:
    points = [Figure(f"growth.a@{x}", "a & b", "µs", "lower", [float(x)], x=x) for x in (10, 1000)]
    (tmp_path / "old.svg").write_text("of a run before")
    write_report(tmp_path, results(ratio(90), *points))
    page = (tmp_path / "latest.md").read_text()
    assert "0 of 1 met" in page
    assert "| decode | 90 tokens/s |  | 0.9 of bare | ≥ 0.97 | **missed** |" in page
    plots = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert plots == ["growth-a.svg", "ratios-speed.svg"]
    for plot in plots:
        ElementTree.parse(tmp_path / plot)
        assert f"({plot})" in page
    assert read(str(tmp_path / "latest.json"))["commit"] == "0123456789abcdef"


def test_every_measure_of_the_table_has_its_module() -> None:
    for name in MEASURES:
        assert (Path(__file__).parent / f"{name}.py").is_file()
