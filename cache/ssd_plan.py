"""What the SSD tier has of a prompt beyond what is in memory, and which files bring it there.

Called on the tier's reader threads, one lookup connection at a time; raises sqlite3.Error. Finds what the prefix tree
would find: the longest chain of blocks, of the block after it the run of first tokens, and for a model with recurrent
state the last checkpoint in that. What still waits to be written is found too, and needs no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omlxd.cache.keys import TOKEN_BYTES, BlockSpec, block_key, common_run, first_tokens, shared, touching
from omlxd.cache.prefix import Standing
from omlxd.cache.ssd_format import Model, Record, missing_rows
from omlxd.cache.ssd_index import Entry, Lookup
from omlxd.cache.ssd_queue import WriteQueue
from omlxd.cache.store import BLOCK, CHECKPOINT


@dataclass(frozen=True, slots=True)
class Step:
    """One record on the way: a file, or one that has not been written yet. `num_tokens` are those it brings."""

    kind: int
    key: bytes
    parent: bytes
    num_tokens: int
    nbytes: int
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Read in order, `steps` make the first `position` tokens usable, at best: a file may turn out to be bad.

    `reach` tokens are stored at all; `stored` are the packed ones with which the stored sequence then goes on.
    """

    steps: Sequence[Step] = ()
    position: int = 0
    reach: int = 0
    stored: bytes = b""


class Planner:
    """Plans for one model."""

    def __init__(self, model: Model, lookup: Lookup, queue: WriteQueue) -> None:
        self._model = model
        self._identity = model.identity.hex()
        self._lookup = lookup
        self._queue = queue

    def plan(self, standing: Standing) -> Plan:
        """Nothing to do where memory is as good as the disk."""
        specs = standing.specs
        parent = specs[standing.blocks - 1].key if standing.blocks else self._model.identity
        path: list[Step] = []
        for spec in specs[standing.blocks :]:
            step = self._step(BLOCK, spec.key)
            if step is None:
                break
            path.append(step)
            parent = spec.key
        depth = standing.blocks + len(path)
        alike = self._alike(specs[depth], parent) if depth < len(specs) else []
        last = _longest(alike)
        run, stored = (last.run, last.stored) if last is not None else (0, b"")
        reach = (specs[depth].start if depth < len(specs) else specs[-1].stop) + run if specs else 0
        if self._model.recurrent:
            return self._to_checkpoint(standing, path, alike, reach=reach, stored=stored)
        position = min(standing.limit, reach)
        if position <= standing.position:
            return Plan((), standing.position, reach, stored)
        return Plan([*path, *([last.step] if last is not None else [])], position, reach, stored)

    def _to_checkpoint(
        self, standing: Standing, path: list[Step], alike: Sequence[_Alike], *, reach: int, stored: bytes
    ) -> Plan:
        specs, run = standing.specs, max((each.run for each in alike), default=0)
        depth = standing.blocks + len(path)
        for level in range(min(depth, len(specs) - 1), -1, -1):
            spec = specs[level]
            stop = min(standing.limit, spec.start + run if level == depth else spec.stop)
            if stop <= standing.position:
                break
            parent = specs[level - 1].key if level else self._model.identity
            found = self._checkpoint(parent, spec, max(standing.position, spec.start) + 1, stop)
            if found is None:
                continue
            position, checkpoint = found
            blocks = path[: max(0, level + 1 - standing.blocks)]
            if level == depth:
                reaching = [each for each in alike if spec.start + each.run >= position]
                blocks = [*path, min(reaching, key=lambda each: each.gaps).step]
            return Plan([*blocks, checkpoint], position, reach, stored)
        return Plan((), standing.position, reach, stored)

    def _checkpoint(self, parent: bytes, spec: BlockSpec, first: int, stop: int) -> tuple[int, Step] | None:
        """The last checkpoint at a position from `first` to `stop`, within the block."""
        keys = {first_tokens(parent, spec, position).key: position for position in range(first, stop + 1)}
        waiting = [key for key in keys if self._queue.find(self._model.identity, (CHECKPOINT, key)) is not None]
        entry = self._lookup.checkpoint(self._identity, list(keys)) if keys else None
        best = max([*waiting, *([entry.key] if entry else [])], key=lambda key: keys[key], default=None)
        step = self._step(CHECKPOINT, best) if best is not None else None
        return (keys[best], step) if best is not None and step is not None else None

    def _step(self, kind: int, key: bytes) -> Step | None:
        record = self._queue.find(self._model.identity, (kind, key))
        if record is not None:
            return Step(kind, key, record.parent, record.spec.num_tokens, 0, record)
        entry = (
            self._lookup.block(self._identity, key) if kind == BLOCK else self._lookup.checkpoint(self._identity, [key])
        )
        return None if entry is None else _step_of(entry)

    def _alike(self, spec: BlockSpec, parent: bytes) -> list[_Alike]:
        """The blocks after `parent` that share first tokens with `spec`."""
        found = [
            _Alike(_step_of(entry), run, entry.gaps, entry.tokens[run * TOKEN_BYTES :])
            for entry in self._lookup.alike(self._identity, parent, spec.tokens)
            if (run := common_run(entry.tokens, spec.tokens)) and _has_pictures_of(entry, spec)
        ]
        waiting = self._queue.alike(self._model.identity, parent, spec.tokens)
        if waiting is not None and (run := shared(waiting.spec, spec.tokens, spec.spans)):
            own = waiting.spec
            step = Step(BLOCK, own.key, parent, own.num_tokens, 0, waiting)
            found.append(_Alike(step, run, missing_rows(waiting), own.tokens[run * TOKEN_BYTES :]))
        return found


@dataclass(frozen=True, slots=True)
class _Alike:
    """A block whose first `run` tokens are the prompt's; its windows lack `gaps` rows, and `stored` follow."""

    step: Step
    run: int
    gaps: int
    stored: bytes


def _longest(alike: Sequence[_Alike]) -> _Alike | None:
    """Of those that share as much, the one that has most of its rows."""
    return max(alike, key=lambda each: (each.run, -each.gaps), default=None)


def _has_pictures_of(entry: Entry, spec: BlockSpec) -> bool:
    """Whether a block has just the prompt's pictures, as far as it goes. The index does not have them, its key does.

    For a prompt without pictures the answer may be wrong: then what is read for it turns out to be of no use.
    """
    if not spec.spans:
        return True
    spans = touching(spec.spans, entry.start, entry.stop)
    return block_key(entry.parent, entry.tokens, spans) == entry.key


def _step_of(entry: Entry) -> Step:
    return Step(entry.kind, entry.key, entry.parent, entry.num_tokens, entry.nbytes)
