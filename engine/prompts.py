"""The prompts under way: requests that have a place and whose prompt is being computed, turn by turn.

Owned by the engine thread. Holds each one's prefill, remembers when it had its latest turn and how fast prompts are
computed, and shows all that to the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from omlxd.engine.prefill import Prefill
from omlxd.engine.prefixes import Prefixes
from omlxd.engine.rate import PrefillRate
from omlxd.engine.request import Request
from omlxd.engine.scheduler import Prompt, View

# Rows that join with fewer tokens, padding included, measure what a pass costs in any case more than what a token does.
MIN_JOINED = 32
# A row that joins with others is copied into a cache with them, which then grows: so many times its KV is read and
# written before its first token. One with a pass of its own reads the weights once more instead.
COPIES = 5


class Prompts:
    """Requests in PREFILL, in the order they were admitted."""

    def __init__(self, prefixes: Prefixes, defers: Callable[[Request], bool], weight_bytes: int | None) -> None:
        """`defers` tells whether a request lets interactive ones go first.

        `weight_bytes` is what a pass reads; None for rows that are never copied into one cache.
        """
        self._prefixes = prefixes
        self._defers = defers
        self._weight_bytes = weight_bytes
        self._heavy: set[str] = set()
        self._under_way: dict[str, tuple[Request, Prefill]] = {}
        self._last_turn: dict[str, int] = {}
        self._turns = 0
        self._after_long = False
        self.rate = PrefillRate()  # of prompts that have no rate of their own yet

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[Request]:
        return (request for request, _ in self._under_way.values())

    def __contains__(self, id: str) -> bool:
        return id in self._under_way

    def __getitem__(self, id: str) -> tuple[Request, Prefill]:
        return self._under_way[id]

    def get(self, id: str) -> Request | None:
        found = self._under_way.get(id)
        return found[0] if found is not None else None

    @property
    def prefills(self) -> list[Prefill]:
        return [prefill for _, prefill in self._under_way.values()]

    def add(self, request: Request, prefill: Prefill) -> None:
        self._under_way[request.id] = (request, prefill)
        self._weigh(request, prefill)

    def forget(self, request: Request) -> None:
        self._under_way.pop(request.id, None)
        self._last_turn.pop(request.id, None)
        self._heavy.discard(request.id)

    def _weigh(self, request: Request, prefill: Prefill) -> None:
        if self._weight_bytes is not None and COPIES * prefill.kv_bytes > self._weight_bytes:
            self._heavy.add(request.id)

    def advanced(self, request: Request, prefill: Prefill, num_tokens: int, elapsed_s: float) -> None:
        """A prompt too long for one turn had one of `num_tokens`."""
        self._weigh(request, prefill)
        prefill.rate.measured(num_tokens, elapsed_s)
        if self.rate.tokens_per_s is None:
            self.rate.measured(num_tokens, elapsed_s)
        self._turns += 1
        self._last_turn[request.id] = self._turns
        self._after_long = True

    def saw(self, request: Request) -> None:
        """A prompt had a turn in which one of its pictures was seen."""
        self._turns += 1
        self._last_turn[request.id] = self._turns
        self._after_long = True

    def joined(self, num_tokens: int, elapsed_s: float) -> None:
        """Short prompts were computed together, `num_tokens` with their padding."""
        if num_tokens >= MIN_JOINED:
            self.rate.measured(num_tokens, elapsed_s)
        self._after_long = False

    def view(self, *, decoding: int, waiting: int) -> View:
        """What the scheduler decides on."""
        return View(
            decoding=decoding,
            waiting=waiting,
            prompts=[self._prompt(request, prefill) for request, prefill in self._under_way.values()],
            rate=self.rate.read(),
            after_long=self._after_long,
        )

    def _prompt(self, request: Request, prefill: Prefill) -> Prompt:
        return Prompt(
            id=request.id,
            remaining=prefill.remaining + 1,
            rate=prefill.rate.read(),
            until_stop=self._prefixes.until_stop(request, prefill.done, prefill.remaining + 1),
            batch_priority=self._defers(request),
            last_turn=self._last_turn.get(request.id, -1),
            warms=request.job.warm,
            apart=prefill.has_pictures,
            heavy=request.id in self._heavy,
        )
