"""mlx-lm alone: what a model does without the daemon around it, for `omlxctl bench` to hold the daemon against.

The main module of a child process that loads one model and nothing of ours. Reads one JSON job from standard input,
`{"path", "runs": [{"name", "prompts", "tokens"}]}` with prompts as token ids, and writes one JSON line for each run:
`{"name", "ttft_ms", "tokens_per_s", "gaps_ms"}`. Imports nothing of this package, so that nothing of it is measured.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model


def run(model: Module, prompts: Sequence[Sequence[int]], tokens: int) -> Mapping[str, Any]:
    """Decodes `tokens` tokens of every prompt in one batch.

    `ttft_ms` is the time to the last row's first token, `tokens_per_s` that of all rows from there on (0 for one
    token), `gaps_ms` the times between two steps.
    """
    generator = BatchGenerator(model, max_tokens=tokens)
    began = time.perf_counter()
    generator.insert([list(prompt) for prompt in prompts])
    arrivals, counts = [], []
    while responses := generator.next_generated():
        arrivals.append(time.perf_counter())
        counts.append(len(responses))
    generator.close()
    first = next(index for index, count in enumerate(counts) if count == max(counts))
    decoded, decode_s = sum(counts[first + 1 :]), arrivals[-1] - arrivals[first]
    return {
        "ttft_ms": (arrivals[first] - began) * 1e3,
        "tokens_per_s": decoded / decode_s if decode_s else 0.0,
        "gaps_ms": [(after - before) * 1e3 for before, after in itertools.pairwise(arrivals[first:])],
    }


def main() -> None:
    job = json.load(sys.stdin)
    model, _ = load_model(Path(job["path"]))
    first = job["runs"][0]
    run(model, first["prompts"], 2)  # the first run of a process compiles what the others reuse
    for each in job["runs"]:
        print(json.dumps({"name": each["name"], **run(model, each["prompts"], each["tokens"])}), flush=True)


if __name__ == "__main__":
    main()
