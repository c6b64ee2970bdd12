"""How long starting takes: the daemon to its socket and to a first token, and `omlxctl` against a bare Python.

The daemon is spawned as a client would spawn it, on a home with one model; `omlxctl` is run as its console script runs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from tests.bench.figures import Figure, Plan
from tests.bench.living import home_with, run_s, spawn
from tests.cli.running import OMLXCTL


async def measure(plan: Plan) -> AsyncIterator[Figure]:
    answering, first_token = [], []
    with home_with("llama") as daemon:
        for _ in range(plan.repeats(7)):
            began = time.perf_counter()
            process, took = spawn(daemon)
            answering.append(took * 1e3)
            daemon.call("generate.complete", model="llama", prompt="x", max_tokens=1, ignore_eos=True, cache=False)
            first_token.append((time.perf_counter() - began) * 1e3)
            daemon.call("daemon.shutdown", grace_s=0)
            process.wait(30)
        yield Figure("start.socket", "daemon start to a ping answered", "ms", "lower", answering, target=400)
        yield Figure("start.first_token", "daemon start to a first token", "ms", "lower", first_token)
        spawn(daemon)
        daemon.call("models.load", model="llama")  # a daemon that still imports answers late
        env = dict(daemon.home.env)
        bare, ping, help_ = [], [], []
        for _ in range(1 + plan.repeats(11)):
            bare.append(run_s("-c", "pass", env=env) * 1e3)
            ping.append(run_s(*OMLXCTL[1:], "ping", env=env) * 1e3)
            help_.append(run_s(*OMLXCTL[1:], "--help", env=env) * 1e3)
    reference = "python -c pass"
    yield Figure("cli.ping", "omlxctl ping", "ms", "lower", ping[1:], reference, bare[1:], target=4)
    yield Figure("cli.help", "omlxctl --help", "ms", "lower", help_[1:], reference, bare[1:], target=4)
