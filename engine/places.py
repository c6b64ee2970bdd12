"""Where each live request is: in the line, on its way from disk, a prompt under way, or a row of the batch.

Owned by the engine thread. Holds the rows and their batch, finds requests wherever they are, and takes them out of
their places, with what they have computed kept for whoever asks again.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx.nn.layers.base import Module

from omlxd.engine.batch import Batch, InterleavedBatch, MergedBatch
from omlxd.engine.fetching import Fetching
from omlxd.engine.following import Following
from omlxd.engine.line import Line
from omlxd.engine.memory import WorkMemory
from omlxd.engine.prefixes import Prefixes
from omlxd.engine.prompts import Prompts
from omlxd.engine.request import Request, State


class Places:
    """One model's live requests.

    `rows` are those that decode, in the order they joined the `batch`. `concerned` are the requests whose work is being
    done: an exception now is about them.
    """

    def __init__(
        self,
        model: Module,
        line: Line,
        fetching: Fetching,
        prompts: Prompts,
        following: Following,
        prefixes: Prefixes,
        memory: WorkMemory,
        *,
        merges_rows: bool,
    ) -> None:
        self._model = model
        self.line = line
        self.fetching = fetching
        self.prompts = prompts
        self.following = following
        self._prefixes = prefixes
        self._memory = memory
        self._merges_rows = merges_rows
        self.rows: dict[str, Request] = {}
        self.concerned: Sequence[Request] = ()
        self.batch: Batch = self._new_batch()

    @property
    def taken(self) -> list[Request]:
        """Those who have one of the rows, as a prompt or decoding."""
        return [*self.prompts, *self.rows.values()]

    @property
    def live(self) -> list[Request]:
        return [*self.line, *self.fetching.requests, *self.taken]

    def find(self, id: str) -> Request | None:
        holders = (self.line.get, self.fetching.get, self.prompts.get, self.rows.get)
        return next((found for get in holders if (found := get(id)) is not None), None)

    def keep(self, request: Request) -> None:
        """Stores what a request that leaves has computed, so that whoever asks again gets further."""
        if request.id in self.rows:
            caches, lacking = self.batch.caches(request.id)
            self._prefixes.leave(request, caches, request.length - lacking)
        elif request.id in self.prompts:
            prefill = self.prompts[request.id][1]
            self._prefixes.leave(request, prefill.caches, prefill.done)

    def forget(self, request: Request) -> None:
        """Takes a request out of its place. Its row stays in the batch until that is told, too."""
        self.line.remove(request)
        self.fetching.forget(request)
        self.rows.pop(request.id, None)
        self.forget_prompt(request)
        self._prefixes.forget(request)
        self._memory.leave(request)

    def forget_prompt(self, request: Request) -> None:
        self.prompts.forget(request)
        self.following.stop(request)

    def requeue(self, request: Request, reason: str) -> None:
        """Takes a request out of its place and back into the line, ahead of its kind: it goes on later."""
        self.batch.remove(frozenset({request.id}))
        self.forget(request)
        request.enter(State.HELD, reason)
        request.enter(State.QUEUED, reason)
        self.line.put_first(request)

    def rebuild(self, joining: Sequence[Request] = ()) -> None:
        """Makes the batch anew; its rows come back from the line.

        So do those that were joining it: nobody knows how far their caches have been computed.
        """
        self.batch.close()
        self.batch = self._new_batch()
        lost = [*self.rows.values(), *(request for request in joining if request.id in self.prompts)]
        for request in reversed(lost):
            self.requeue(request, "the batch is rebuilt")

    def _new_batch(self) -> Batch:
        kind = MergedBatch if self._merges_rows else InterleavedBatch
        return kind(self._model, last_apart=self._prefixes.only_at_checkpoints)
