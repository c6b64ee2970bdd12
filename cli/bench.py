"""`omlxctl bench MODEL`: how fast this machine runs a model, through the daemon and with mlx-lm alone.

The daemon runs first; then it unloads the model, and mlx-lm loads it in a process of its own, so that memory never has
to hold it twice. Main thread only.
"""

from __future__ import annotations

import argparse
import random
import statistics
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from omlxd.cli.bench_runs import Run, Sample, ThroughDaemon, alone
from omlxd.cli.console import Console
from omlxd.cli.context import Context
from omlxd.cli.errors import DONE, CliError, UsageError
from omlxd.cli.generation import checked, list_models, model_argument
from omlxd.cli.parser import Parser
from omlxd.cli.tables import table
from omlxd.cli.work import perform
from omlxd.rpc.client import Client, RpcError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BATCHES = (1, 4, 16)
SHORT_TOKENS = 32
LONG_FACTOR = 4  # the prompt that a running stream is held up by, in prompts of the usual length
_CONTEXT_TOO_LONG = -32014


@dataclass(slots=True)
class Figure:
    """One line of the result: the daemon's samples, and mlx-lm's where it has the like."""

    title: str
    unit: str
    samples: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)


class Bench:
    """Measures one model."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument("model", metavar="MODEL")
        parser.add_argument("--repeats", type=int, default=3, metavar="N", help="how often each is run (default: 3)")
        parser.add_argument(
            "--prompt-tokens", type=int, default=2048, metavar="N", help="length of a prompt (default: 2048)"
        )
        parser.add_argument("--tokens", type=int, default=128, metavar="N", help="length of an answer (default: 128)")
        parser.add_argument("--no-compare", action="store_true", help="the daemon only, without mlx-lm alone")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        for name, least in (("repeats", 1), ("prompt_tokens", 2), ("tokens", 2)):
            if vars(given)[name] < least:
                raise UsageError(f"--{name.replace('_', '-')} is at least {least}, not {vars(given)[name]}")
        model, console = model_argument(checked(given.model, "MODEL")), context.console
        with context.connect_to_work() as client:
            _refuse_if_loaded(client, model, compares=not given.no_compare)
            entry = perform(client, "models.load", {"model": model}, console)
            failure = None
            try:
                console.progress(f"warming up: a prompt of {LONG_FACTOR * given.prompt_tokens} tokens")
                workload = _workload(client, model, given)
                figures = _figures(workload)
                _through_daemon(ThroughDaemon(client, model), workload, figures, console)
            finally:
                if not given.no_compare:
                    client.call("models.unload", {"model": model, "now": True})
            if not given.no_compare:
                failure = _alone(entry["path"], workload, figures, console)
            info = client.call("daemon.info")
        _show(console, entry, info, figures, failure)
        return DONE


def _refuse_if_loaded(client: Client, model: str, *, compares: bool) -> None:
    """It would have to be unloaded for mlx-lm, and loading it again would not bring back how it was loaded."""
    for entry in list_models(client):
        if model not in (entry["name"], entry["path"]) or entry["state"] in ("ABSENT", "FAILED"):
            continue
        if entry["requests"]:
            raise CliError(f"{model} has {entry['requests']} live requests; measure it when they are done")
        if compares:
            raise CliError(
                f"{model} is loaded, and mlx-lm would load it a second time; `omlxctl unload {model}` first, "
                "or measure the daemon only with --no-compare"
            )


@dataclass(frozen=True, slots=True)
class Workload:
    """Every prompt, as token ids; `long` is the one that a stream is held up by."""

    prefills: Sequence[Run]
    decodes: Sequence[Run]
    long: Sequence[int]

    @property
    def runs(self) -> Sequence[Run]:
        return [*self.prefills, *self.decodes]


def _workload(client: Client, model: str, given: argparse.Namespace) -> Workload:
    """Prompts of words that nobody ever said: nothing is stored that begins like one of them."""
    length = given.prompt_tokens
    ids = _ids(client, model, given.repeats * (length + sum(BATCHES) * SHORT_TOKENS) + LONG_FACTOR * length)
    long = _that_fits(client, model, [next(ids) for _ in range(LONG_FACTOR * length)])
    length = min(length, len(long))
    repeats = range(given.repeats)
    prefills = [Run("prefill", [_take(ids, length)], 1) for _ in repeats]
    decodes = [
        Run(f"decode {rows}", [_take(ids, SHORT_TOKENS) for _ in range(rows)], given.tokens)
        for _ in repeats
        for rows in BATCHES
    ]
    return Workload(prefills, decodes, long)


def _ids(client: Client, model: str, count: int) -> Iterator[int]:
    letters = string.ascii_lowercase
    words = ("".join(random.choices(letters, k=5)) for _ in range(count))  # a word is a token at least
    tokens: list[int] = client.call("tokenize", {"model": model, "text": " ".join(words)})["tokens"]
    return iter(tokens)


def _take(ids: Iterator[int], count: int) -> list[int]:
    return [next(ids) for _ in range(count)]


def _that_fits(client: Client, model: str, long: Sequence[int]) -> Sequence[int]:
    """As much of the prompt as the model's context takes beside an answer. Running it warms the daemon up, too."""
    try:
        ThroughDaemon(client, model).run(Run("warm-up", [long], 1))
    except RpcError as error:
        if error.code != _CONTEXT_TOO_LONG:
            raise
        return long[: error.data["limit"] // 2]
    return long


def _figures(workload: Workload) -> dict[str, Figure]:
    length = len(workload.prefills[0].prompts[0])
    long = f"beside a prompt of {len(workload.long)}"
    return {
        "prefill": Figure(f"prefill, {length} tokens", "tokens/s"),
        **{f"decode {rows}": Figure(f"decode, {rows} at once", "tokens/s") for rows in BATCHES},
        "cold": Figure(f"first token, {length} tokens", "ms"),
        "warm": Figure("first token, the same again", "ms"),
        "p50": Figure("between tokens, p50", "ms"),
        "p99": Figure("between tokens, p99", "ms"),
        "busy p50": Figure(f"{long}, p50", "ms"),
        "busy p99": Figure(f"{long}, p99", "ms"),
    }


def _through_daemon(daemon: ThroughDaemon, workload: Workload, figures: dict[str, Figure], console: Console) -> None:
    runs = workload.runs
    for done, run in enumerate(runs):
        console.progress(f"through the daemon: {run.name}, {done + 1} of {len(runs)}")
        cold = daemon.run(run, cache=run.name == "prefill")
        for name, value in _readings(run, cold).items():
            figures[name].samples.append(value)
        if run.name == "prefill":
            figures["warm"].samples.append(daemon.run(run, cache=True).ttft_ms)
    for done, run in enumerate(workload.prefills):
        console.progress(f"through the daemon: a stream beside a long prompt, {done + 1} of {len(workload.prefills)}")
        gaps = daemon.beside(run.prompts[0][:SHORT_TOKENS], workload.long)
        for name, share in (("busy p50", 0.5), ("busy p99", 0.99)):
            if gaps:
                figures[name].samples.append(_percentile(gaps, share))
    console.clear_progress()


def _alone(path: str, workload: Workload, figures: dict[str, Figure], console: Console) -> str | None:
    """The same with mlx-lm; returns why not, if it cannot run the model."""
    runs, done = workload.runs, 0

    def took() -> None:
        nonlocal done
        done += 1
        console.progress(f"mlx-lm alone: {done} of {len(runs)}")

    console.progress("mlx-lm alone: loading")
    try:
        samples = alone(path, runs, took)
    except CliError as error:
        return error.message
    finally:
        console.clear_progress()
    for run, (_, sample) in zip(runs, samples, strict=True):
        for name, value in _readings(run, sample).items():
            figures[name].alone.append(value)
    return None


def _readings(run: Run, sample: Sample) -> dict[str, float]:
    """Which figures a run's sample belongs to."""
    if run.name == "prefill":
        return {"prefill": len(run.prompts[0]) / sample.ttft_ms * 1e3, "cold": sample.ttft_ms}
    found = {run.name: sample.tokens_per_s}
    if len(run.prompts) == 1 and sample.gaps_ms:  # none where all came at once
        found |= {"p50": _percentile(sample.gaps_ms, 0.5), "p99": _percentile(sample.gaps_ms, 0.99)}
    return found


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def _show(console: Console, entry: Any, info: Any, figures: dict[str, Figure], failure: str | None) -> None:
    if console.json:
        document = {
            "model": entry["name"],
            "path": entry["path"],
            "device": info["device"],
            "platform": info["platform"],
            "versions": {name: info[name] for name in ("version", "mlx", "mlx_lm")},
            "figures": [_entry(name, figure) for name, figure in figures.items()],
            "alone_failed": failure,
        }
        console.document(document)
        return
    console.line(table(["", "OMLXD", "MLX-LM ALONE", "RATIO"], [_row(figure) for figure in figures.values()]))
    if failure is not None:
        console.note(failure)


def _entry(name: str, figure: Figure) -> dict[str, Any]:
    return {
        "name": name.replace(" ", "_"),
        "title": figure.title,
        "unit": figure.unit,
        "value": _median(figure.samples),
        "samples": figure.samples,
        "alone": _median(figure.alone),
        "alone_samples": figure.alone,
        "ratio": _ratio(figure),
    }


def _row(figure: Figure) -> list[str]:
    ours, theirs, ratio = _median(figure.samples), _median(figure.alone), _ratio(figure)
    return [
        figure.title,
        "-" if ours is None else f"{ours:.4g} {figure.unit}",
        "-" if theirs is None else f"{theirs:.4g} {figure.unit}",
        "" if ratio is None else f"{ratio:.2f}",
    ]


def _median(samples: Sequence[float]) -> float | None:
    return statistics.median(samples) if samples else None


def _ratio(figure: Figure) -> float | None:
    ours, theirs = _median(figure.samples), _median(figure.alone)
    return ours / theirs if ours is not None and theirs else None
