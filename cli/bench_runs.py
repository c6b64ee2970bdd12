"""What `omlxctl bench` runs: the workload as token ids, and one run of it through the daemon or by mlx-lm alone.

A run is some prompts and how many tokens of each; what it comes to has the same form from both. Main thread only.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from omlxd.cli.errors import CANCELLED_CODE, CliError
from omlxd.rpc.client import Call, Client, RpcError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# -P as for the daemon: what lies in the current directory is not to be run.
ALONE = (sys.executable, "-P", "-m", "omlxd.engine.alone")


@dataclass(frozen=True, slots=True)
class Run:
    """Some prompts, decoded together for `tokens` tokens each."""

    name: str
    prompts: Sequence[Sequence[int]]
    tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One run's times: to the first token, and between two tokens, in ms; and all rows' rate after the first."""

    ttft_ms: float
    tokens_per_s: float
    gaps_ms: Sequence[float] = field(default=())


class ThroughDaemon:
    """Runs on the daemon that `client` is connected to."""

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model
        self._tokens = itertools.count()

    def run(self, run: Run, *, cache: bool = False) -> Sample:
        """The times are this process's own, so the socket is in them; the rate is the daemon's own reckoning."""
        began = time.perf_counter()
        calls = [self._start(prompt, run.tokens, cache=cache) for prompt in run.prompts]
        arrivals = [time.perf_counter() for _ in calls[0]]
        timings = [call.result()["timings"] for call in calls]
        rates = [(run.tokens - 1) / timing["decode_ms"] * 1e3 for timing in timings if timing["decode_ms"]]
        return Sample((arrivals[0] - began) * 1e3, sum(rates), gaps_ms(arrivals))

    def beside(self, prompt: Sequence[int], long: Sequence[int]) -> Sequence[float]:
        """The gaps of a stream while another prompt is computed."""
        stream = self._start(prompt, 1 << 20, cache=False)
        values = iter(stream)
        next(values)
        other = self._start(long, 1, cache=False)
        arrivals = []
        for _ in values:
            arrivals.append(time.perf_counter())
            if other.has_ended:
                break
        other.result()
        stream.cancel()
        try:
            stream.result()
        except RpcError as error:
            if error.code != CANCELLED_CODE:
                raise
        return gaps_ms(arrivals)

    def _start(self, prompt: Sequence[int], tokens: int, *, cache: bool) -> Call:
        params = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache": cache,
            "partialResultToken": f"bench {next(self._tokens)}",  # the tokens as they come, and no progress
            "return_token_ids": True,  # or a token that ends no character would send nothing
        }
        return self._client.start("generate.complete", params)


def alone(path: str, runs: Sequence[Run], took: Callable[[], None]) -> list[tuple[str, Sample]]:
    """The same runs by mlx-lm in a process of its own; `took` is called after each. Raises CliError when it fails."""
    job: dict[str, Any] = {
        "path": path,
        "runs": [{"name": run.name, "prompts": run.prompts, "tokens": run.tokens} for run in runs],
    }
    samples = []
    with subprocess.Popen(
        ALONE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            child.stdin.write(json.dumps(job))
            child.stdin.close()
            for line in child.stdout:
                found = json.loads(line)
                samples.append((found["name"], Sample(found["ttft_ms"], found["tokens_per_s"], found["gaps_ms"])))
                took()
            said = child.stderr.read().strip().splitlines()
        finally:
            child.kill()  # of no effect when it has ended by itself
    if len(samples) < len(runs):
        reason = said[-1] if said else f"its process ended with code {child.returncode}"
        raise CliError(f"mlx-lm alone could not run the model: {reason}")
    return samples


def gaps_ms(arrivals: Sequence[float]) -> list[float]:
    return [(after - before) * 1e3 for before, after in itertools.pairwise(arrivals)]
