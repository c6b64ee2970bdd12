"""The SSD tier: the first token after a restart and after kill -9, what a token takes on disk, and what writing costs.

An engine with a store in a directory of its own; what a restart is, is the store closed and opened again, and what
kill -9 is, is a child that computes, flushes and dies. The llama is the measures' own.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from omlxd.cache.hot import HotTier
from omlxd.cache.keys import chain, pack
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.pieces import Piece
from omlxd.cache.prefix import PrefixCache
from omlxd.cache.ssd import SsdStore
from omlxd.cache.ssd_format import Model
from omlxd.cache.ssd_index import Entry, Index, Lookup
from omlxd.cache.store import BLOCK, Offer, StoredBlock
from omlxd.engine.model import LoadedModel
from tests.bench.bench_model import CONTEXT, llama
from tests.bench.figures import Figure, Plan
from tests.cache.shelves import flush, open_store
from tests.engine.running import Running, engine, job, loaded
from tests.models import VOCABULARY

TOKENS, DECODED, ENTRIES, BLOCK_SIZE = 2048, 100, 100_000, 256
PLENTY = 8 << 30


async def measure(plan: Plan) -> AsyncIterator[Figure]:
    rounds = plan.repeats(5)
    with folder() as home:
        cold = [(await ttft_ms(home, prompt(seed)))[0] for seed in range(rounds)]
        stored = sum(path.stat().st_size for path in (home / "cache").rglob("*.safetensors"))
        again = [await reused_ms(home, prompt(seed)) for seed in range(rounds)]
        killed = []
        for seed in range(100, 100 + rounds):
            command = [sys.executable, "-m", "tests.bench.on_disk", str(home), str(seed)]
            assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
            killed.append(await reused_ms(home, prompt(seed)))
    reference = f"cold, {TOKENS} tokens"
    yield Figure("disk.restart", "first token after a restart", "ms", "lower", again, reference, cold, target=0.03)
    yield Figure("disk.kill", "first token after kill -9", "ms", "lower", killed, reference, cold, target=0.03)
    in_memory = sum(leaf.nbytes for leaf in kv_of(TOKENS)) / TOKENS
    per_token = [stored / (rounds * TOKENS + 64)]  # 64 of the prompt that warms up
    yield Figure("disk.bytes", "bytes on SSD per token", "B", "lower", per_token, "its KV in memory", [in_memory])
    with folder() as home:
        yield Figure("disk.bandwidth", "writing blocks", "MB/s", "higher", bandwidth(home, rounds))
        idle, busy = await decoding(home, rounds)
    yield Figure(
        "disk.decode", "decode beside a busy writer", "tokens/s", "higher", busy, "no writes", idle, target=0.95
    )
    with folder() as home:
        opened = opening_ms(home, plan.repeats(5))
    yield Figure("disk.index", f"opening an index of {ENTRIES} entries", "ms", "lower", opened, target=200)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(TOKENS)]


def kv_of(tokens: int) -> Sequence[mx.array]:
    caches = make_prompt_cache(llama())
    llama()(mx.zeros((1, tokens), mx.int32), cache=caches)
    return [array[..., :tokens, :] for cache in caches for array in cache.state[:2]]


def with_store(store: SsdStore) -> LoadedModel:
    layout = ModelLayout(make_prompt_cache(llama()))
    view = store.view(Model.of(layout, bytes(32), BLOCK_SIZE))
    cache = PrefixCache(root=bytes(32), layout=layout, tier=HotTier(4 << 30), block_size=BLOCK_SIZE, store=view)
    view.feed_from(cache.offers)
    plain = loaded("llama", llama())
    return replace(plain, cache=cache, store=view, facts=replace(plain.facts, context_tokens=CONTEXT))


async def ttft_ms(home: Path, tokens: Sequence[int]) -> tuple[float, int]:
    """Of a first request after a start; and how many of its tokens were there."""
    store = open_store(home, max_bytes=PLENTY)
    async with engine(with_store(store)) as running:
        await Running(running, job(prompt(99)[:64], 2)).result()  # the machine is warm, the prompt is not
        result = await Running(running, job(tokens, 2)).result()
    store.close(60)
    return result.timings.ttft_ms, result.usage.cached_tokens


async def reused_ms(home: Path, tokens: Sequence[int]) -> float:
    took, cached = await ttft_ms(home, tokens)
    assert cached == len(tokens) - 1
    return took


async def compute_and_die(home: Path, seed: int) -> None:
    store = open_store(home, max_bytes=PLENTY)
    async with engine(with_store(store)) as running:
        await Running(running, job(prompt(seed), 2)).result()
        flush(store)
        os.kill(os.getpid(), signal.SIGKILL)


# -- writing ----------------------------------------------------------------------------------------------------------


def made_up_blocks(count: int) -> Iterator[tuple[Model, Offer]]:
    """Blocks of 4 MB of a model that is none."""
    rows = mx.zeros((1, 4, BLOCK_SIZE, 64), dtype=mx.float16)
    mx.eval(rows)
    model = Model(b"\2" * 32, "made up", BLOCK_SIZE, 16, 0)
    for number in range(count):
        (spec,) = chain(model.identity, pack([number] * BLOCK_SIZE), (), BLOCK_SIZE)
        pieces = [Piece((rows, rows), BLOCK_SIZE, 0, BLOCK_SIZE)] * 16
        yield model, Offer(StoredBlock(model.identity, spec, pieces))


def bandwidth(home: Path, rounds: int) -> list[float]:
    """Megabytes a second from the offer to the last file in its place."""
    rates = []
    for number in range(rounds):
        store = open_store(home / str(number), max_bytes=PLENTY)
        began = time.perf_counter()
        for model, block in made_up_blocks(32):
            store.offer(model, block)
        flush(store)
        took = time.perf_counter() - began
        store.close(60)
        rates.append(sum(path.stat().st_size for path in (home / str(number)).rglob("*.safetensors")) / took / 1e6)
    return rates


def keep_busy(store: SsdStore, stop: threading.Event) -> None:
    """Offers blocks as fast as the writer takes them."""
    for model, block in made_up_blocks(1 << 30):
        store.offer(model, block)
        if stop.wait(0.002):
            return


async def decoding(home: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Tokens per second with an idle writer and with a busy one, in turns."""
    store = open_store(home, max_bytes=256 << 20)
    idle, busy = [], []
    async with engine(with_store(store)) as running:
        for seed in range(rounds):
            result = await Running(running, job(prompt(seed)[:32], DECODED)).result()
            idle.append(result.timings.tokens_per_s)
            stop = threading.Event()
            writer = threading.Thread(target=keep_busy, args=(store, stop))
            writer.start()
            result = await Running(running, job(prompt(seed)[:32], DECODED, use_cache=False)).result()
            busy.append(result.timings.tokens_per_s)
            stop.set()
            writer.join()
            flush(store)
    store.close(60)
    return idle, busy


def opening_ms(home: Path, rounds: int) -> list[float]:
    path = home / "index.sqlite"
    index, parent = Index(path), bytes(32)
    index.begin()
    for number in range(ENTRIES):
        key = os.urandom(32)
        index.add(Entry(0, "m", BLOCK, key, parent, number % 100 * 256, os.urandom(1024), 0, 4_000_000), used=number)
        parent = bytes(32) if number % 100 == 99 else key
    index.commit()
    index.close()
    opened = []
    for _ in range(rounds):
        began = time.perf_counter()
        index, lookup = Index(path), Lookup(path)
        lookup.block("m", key)
        opened.append((time.perf_counter() - began) * 1e3)
        index.close()
        lookup.close()
    return opened


if __name__ == "__main__":
    asyncio.run(compute_and_die(Path(sys.argv[1]), int(sys.argv[2])))
