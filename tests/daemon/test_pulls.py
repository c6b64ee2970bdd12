"""Pulls beside the rest of the daemon: given up at once, and never after the daemon's end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from omlxd.daemon.pulls import MAX_PULLS, Pulls
from omlxd.engine.api import Cancelled, Progress, ProgressSink, ShuttingDown


class Download:
    """A pull that goes on until it is given up or let through, and says so."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.given_up = 0

    def __call__(
        self, source: str, name: str | None, *, models_dir: Path, progress: ProgressSink, cancelled: Callable[[], bool]
    ) -> Path:
        self.begun.release()
        progress(Progress("download", 1, 2))
        while not self.may_end.wait(0.001):
            if cancelled():
                self.given_up += 1
                raise Cancelled(reason="the pull was given up")
        return models_dir / source

    async def has_begun(self) -> None:
        await asyncio.to_thread(self.begun.acquire)


def quiet(_: Progress) -> None:
    """Nobody looks."""


def pulling(story: Callable[[Pulls, Download], Awaitable[None]]) -> None:
    async def told() -> None:
        download = Download()
        pulls = Pulls(download, Path("/models"))
        async with asyncio.timeout(20):
            await story(pulls, download)
            await pulls.close()

    asyncio.run(told())


def test_a_pull_gives_the_folder_and_its_progress() -> None:
    async def story(pulls: Pulls, download: Download) -> None:
        seen: list[Progress] = []
        download.may_end.set()
        assert await pulls.run("m", None, seen.append) == Path("/models/m")
        assert seen == [Progress("download", 1, 2)]

    pulling(story)


def test_a_cancelled_pull_has_let_go_when_the_cancellation_is_over() -> None:
    async def story(pulls: Pulls, download: Download) -> None:
        task = asyncio.create_task(pulls.run("m", None, quiet))
        await download.has_begun()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert download.given_up == 1

    pulling(story)


def test_closing_gives_every_pull_up_and_says_why() -> None:
    async def story(pulls: Pulls, download: Download) -> None:
        tasks = [asyncio.create_task(pulls.run(f"m{n}", None, quiet)) for n in range(2)]
        for _ in tasks:
            await download.has_begun()
        await pulls.close()
        assert download.given_up == 2
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [ShuttingDown, ShuttingDown]
        with pytest.raises(ShuttingDown):
            await pulls.run("late", None, quiet)

    pulling(story)


def test_more_pulls_than_threads_wait_and_other_work_does_not() -> None:
    async def story(pulls: Pulls, download: Download) -> None:
        tasks = [asyncio.create_task(pulls.run(f"m{n}", None, quiet)) for n in range(MAX_PULLS + 20)]
        for _ in range(MAX_PULLS):
            await download.has_begun()
        assert await asyncio.to_thread(lambda: "read") == "read"
        download.may_end.set()
        assert len(await asyncio.gather(*tasks)) == MAX_PULLS + 20

    pulling(story)


def test_a_pull_that_waits_is_cancelled_without_ever_beginning() -> None:
    async def story(pulls: Pulls, download: Download) -> None:
        first = [asyncio.create_task(pulls.run(f"m{n}", None, quiet)) for n in range(MAX_PULLS)]
        for _ in first:
            await download.has_begun()
        waiting = asyncio.create_task(pulls.run("late", None, quiet))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        download.may_end.set()
        await asyncio.gather(*first)
        assert not download.begun.acquire(blocking=False)

    pulling(story)
