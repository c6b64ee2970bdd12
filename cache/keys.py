"""Chain keys: what names a block, and how far two token runs agree.

Pure functions and values, for any thread. A key commits to the model's identity, to every token before the block, to
its own tokens and to the pictures that some of them stand for, so equal keys mean equal state. Only blake2b and fixed
byte orders are used: the same prompt has the same keys in the next process and in another directory.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Tokens [start, stop) of a prompt stand for one picture (or sound) whose content has this digest."""

    start: int
    stop: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A block as its prompt defines it: `start` is its first token's position, `spans` are those that touch it."""

    key: bytes
    start: int
    tokens: bytes
    spans: tuple[MediaSpan, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit words. Raises OverflowError for an id that is negative or too large."""
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def unpack(tokens: bytes) -> list[int]:
    """The token ids that `pack` was given."""
    words = array("I")
    words.frombytes(tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tolist()


def chain(root: bytes, tokens: bytes, media: Sequence[MediaSpan], block_size: int) -> list[BlockSpec]:
    """The prompt's blocks, the last one partial if its tokens do not fill it. `root` is the identity's digest."""
    width = block_size * TOKEN_BYTES
    specs: list[BlockSpec] = []
    key = root
    for offset in range(0, len(tokens), width):
        part = tokens[offset : offset + width]
        start = offset // TOKEN_BYTES
        spans = touching(media, start, start + len(part) // TOKEN_BYTES)
        key = block_key(key, part, spans)
        specs.append(BlockSpec(key, start, part, spans))
    return specs


def apart(digest: bytes) -> tuple[MediaSpan, ...]:
    """What keeps a prompt's blocks from everyone else's: as if its first token stood for a picture. None for b"".

    It has no position inside, so that a prefix may still end anywhere.
    """
    return (MediaSpan(0, 1, digest),) if digest else ()


def touching(media: Sequence[MediaSpan], start: int, stop: int) -> tuple[MediaSpan, ...]:
    """The spans that share at least one token with [start, stop)."""
    return tuple(span for span in media if span.start < stop and span.stop > start) if media else ()


def block_key(parent: bytes, tokens: bytes, spans: Sequence[MediaSpan]) -> bytes:
    """The key of the block of these tokens after the one whose key is `parent`; `spans` are those that touch it."""
    # Every part is preceded by its length, so that no two different inputs concatenate to the same bytes.
    digest = blake2b(parent, digest_size=32, person=b"omlxd block")
    digest.update(len(tokens).to_bytes(8, "little") + tokens)
    for span in spans:
        digest.update(span.start.to_bytes(8, "little") + span.stop.to_bytes(8, "little"))
        digest.update(len(span.digest).to_bytes(8, "little") + span.digest)
    return digest.digest()


def first_tokens(parent: bytes, spec: BlockSpec, stop: int) -> BlockSpec:
    """The partial block, after the same `parent`, that ends at position `stop` of the sequence."""
    tokens = spec.tokens[: (stop - spec.start) * TOKEN_BYTES]
    spans = touching(spec.spans, spec.start, stop)
    return BlockSpec(block_key(parent, tokens, spans), spec.start, tokens, spans)


def common_run(one: bytes, other: bytes) -> int:
    """How many leading tokens two packed runs share."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length // TOKEN_BYTES
    equal, unequal = 0, length // TOKEN_BYTES  # the first `equal` tokens agree, the first `unequal` do not
    while unequal - equal > 1:
        middle = (equal + unequal) // 2
        if one[equal * TOKEN_BYTES : middle * TOKEN_BYTES] == other[equal * TOKEN_BYTES : middle * TOKEN_BYTES]:
            equal = middle
        else:
            unequal = middle
    return equal


def shared(one: BlockSpec, tokens: bytes, spans: Sequence[MediaSpan]) -> int:
    """How many leading tokens of block `one` another run at the same position shares, pictures included.

    A picture that differs, or that one of the two lacks, ends the run where it begins.
    """
    run = common_run(one.tokens, tokens)
    for span in {*one.spans, *spans}:
        if span.start < one.start + run and not (span in one.spans and span in spans):
            run = max(0, span.start - one.start)
    return run
