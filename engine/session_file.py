"""A session as one file: written as mlx-lm's `load_prompt_cache` reads it, and read back without trusting it.

Pure, on any thread that may wait. Reading never looks up a class that a file names: the model's own empty caches are
filled, if what the file has is what theirs would be: the same classes, the same arrays in type and shape but for the
number of rows, all of them at the one position that the tokens give.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import save_prompt_cache

from omlxd.cache.disk import PRIVATE_FILE
from omlxd.cache.errors import CacheError
from omlxd.cache.keys import MediaSpan, pack, unpack
from omlxd.cache.layouts import COMPOSITES, Leaf, Recurrent, class_name, layout_for, leaves
from omlxd.cache.prefix import Hit, PrefixCache
from omlxd.cache.ssd_format import BadFile, read_tensors

FORMAT = "omlxd session 1"
MAX_TOKENS = 16 << 20
SAMPLE_TOKENS = 17  # computed here to compare with what the file has
MIN_SAMPLE_TOKENS = 2  # of which the last is not computed
MAX_PICTURES = 4096
DIGEST_BYTES = 32
MAX_NAME = 64
MAX_DEPTH = 8
SAME = 0.05  # of the largest number: how far the same tokens' numbers may be apart between two machines


class BadSession(CacheError):
    """A file cannot be imported; the message says why."""


@dataclass(frozen=True, slots=True)
class Content:
    """A file's, checked for form only: `scalars` name those arrays that stand for a number, a text or nothing."""

    tokens: list[int]
    classes: Sequence[str]
    scalars: Mapping[str, str]
    arrays: Mapping[str, mx.array]
    pictures: Sequence[MediaSpan] = ()

    @property
    def sample(self) -> list[int]:
        """The first tokens, up to a picture: nobody here has that to compare."""
        return self.tokens[: min([SAMPLE_TOKENS, *(picture.start for picture in self.pictures)])]


def write(path: Path, caches: Sequence[Leaf], tokens: Sequence[int], pictures: Sequence[MediaSpan] = ()) -> int:
    """Writes caches that stand at the end of `tokens`; returns the file's bytes. Raises OSError; replaces no file."""
    part = path.with_name(f".{path.stem}.{os.getpid()}.part.safetensors")
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE))  # the name is ours now
    done = False
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE))
        save_prompt_cache(str(part), list(caches), _metadata(tokens, pictures))
        os.replace(part, path)
        done = True
    except RuntimeError as error:  # how mlx says that it cannot write
        raise OSError(None, str(error), str(path)) from error
    finally:
        if not done:
            part.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    return path.stat().st_size


def _metadata(tokens: Sequence[int], pictures: Sequence[MediaSpan]) -> dict[str, str]:
    said = {"format": FORMAT, "tokens": pack(tokens).hex()}
    spans = ",".join(f"{picture.start}-{picture.stop}-{picture.digest.hex()}" for picture in pictures)
    return {**said, "pictures": spans} if spans else said


def restored(tokens: Sequence[int], media: Sequence[MediaSpan], cache: PrefixCache) -> Hit:
    """Caches that stand at the end of `tokens`, or as near as what is stored allows, for any thread to read.

    On the engine thread; who asks releases the hit.
    """
    hit = cache.lookup([*tokens, 0], media)  # a lookup leaves the last of its tokens to be computed
    mx.eval([each.state for each in hit.caches])
    return hit


def read(path: Path, max_bytes: int) -> Content:
    """Raises BadSession, OSError. Takes up to twice the file's size of memory."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BadSession("it is no plain file")
        if status.st_size > max_bytes:
            raise BadSession(f"it has {status.st_size} bytes, sessions.max_bytes allows {max_bytes}")
        data = file.read(status.st_size)  # and no more, should it grow meanwhile
    try:
        said, arrays = read_tensors(data)
        parts: Any = _tree(list(said.items()))
        metadata, classes, scalars = parts
        if metadata["format"] != FORMAT:
            raise BadSession(f"it is no session of ours: its format is {str(metadata['format'])[:40]!r}")
        tokens = bytes.fromhex(metadata["tokens"])
        if not 0 < len(tokens) <= 4 * MAX_TOKENS or len(tokens) % 4:
            raise BadSession(f"it names {len(tokens)} bytes of token ids")
        kinds = {str(name): str(kind) for name, kind in scalars[1:]}
        pictures = _pictures(metadata.get("pictures", ""), len(tokens) // 4)
        return Content(unpack(tokens), [str(name) for name in classes], kinds, arrays, pictures)
    except BadFile as error:
        raise BadSession(error.reason) from error
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise BadSession(f"its description cannot be read ({type(error).__name__})") from error


def _pictures(text: str, num_tokens: int) -> list[MediaSpan]:
    """Raises BadSession unless they follow one another within the tokens, behind some that can be compared."""
    if text.count(",") >= MAX_PICTURES:
        raise BadSession(f"it has more than {MAX_PICTURES} pictures")
    pictures, free = [], MIN_SAMPLE_TOKENS
    for said in text.split(",") if text else ():
        start, stop, digest = said.split("-")
        picture = MediaSpan(int(start), int(stop), bytes.fromhex(digest))
        if not free <= picture.start < picture.stop <= num_tokens or len(picture.digest) != DIGEST_BYTES:
            raise BadSession(f"a picture in it cannot be: {said[:40]!r} of {num_tokens} tokens")
        pictures.append(picture)
        free = picture.stop
    return pictures


def _tree(items: Sequence[tuple[str, Any]], depth: int = 0) -> Any:
    """What `tree_flatten` made these of. mlx's own way back makes a list as long as the largest number in a name."""
    if len(items) == 1 and items[0][0] == "":
        return items[0][1]
    if depth > MAX_DEPTH:
        raise BadSession(f"it is nested deeper than {MAX_DEPTH} levels")
    inner: dict[str, list[tuple[str, Any]]] = {}
    for name, value in items:
        first, _, rest = name.partition(".")
        inner.setdefault(first, []).append((rest, value))
    parts = {name: _tree(children, depth + 1) for name, children in inner.items()}
    if not all(name.isdecimal() for name in parts):
        return parts
    try:
        return [parts[str(number)] for number in range(len(parts))]
    except KeyError:
        raise BadSession("a list in it lacks members") from None


def caches_of(content: Content, model: Sequence[Leaf], fresh: Sequence[Leaf]) -> list[Leaf]:
    """`fresh`, the model's empty caches, filled with what the file holds. Raises BadSession.

    `model` are caches of the model that hold the file's first few tokens, computed here: what must be alike is compared
    with them, the numbers of those tokens too, so that another model's file is found out.
    """
    names = [type(cache).__name__ for cache in model]
    if list(content.classes) != names:
        raise BadSession(f"it has caches of {_short(content.classes)}, the model has {_short(names)}")
    states = _states(content, len(fresh))
    position = len(content.tokens)
    try:
        for cache, state in zip(fresh, states, strict=True):
            _fill(cache, state)
        for index, (leaf, known) in enumerate(zip(leaves(fresh), leaves(model), strict=True)):
            _check_leaf(index, leaf, known, position)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise BadSession(f"its state is not that of such a cache ({type(error).__name__})") from error
    return list(fresh)


def _states(content: Content, count: int) -> list[Any]:
    found: list[tuple[str, Any]] = []
    for name, array in content.arrays.items():
        kind = content.scalars.get(name)
        found.append((name, array if kind is None else _scalar(name, array, kind)))
    states = _tree(found)
    if not isinstance(states, list) or len(states) != count:
        raise BadSession("it has another number of caches than it says")
    return states


def _scalar(name: str, array: mx.array, kind: str) -> object:
    if kind == "none" and array.size == 0:
        return None
    if kind == "scalar" and array.ndim == 0 and array.dtype in (mx.int32, mx.int64, mx.uint32):
        return int(memoryview(array).tolist())  # type: ignore[arg-type, call-overload]
    if kind == "string" and array.ndim == 1 and array.size <= MAX_NAME:
        codes: list[Any] = memoryview(array).tolist()  # type: ignore[arg-type]
        if all(type(code) is int and 0 <= code < 128 for code in codes):
            return bytes(codes).decode()
    raise BadSession(f"{name[:40]!r} is neither a number nor a name")


def _fill(cache: Leaf, state: Any) -> None:
    """Gives a cache its state. A composite's members are the model's own, whatever classes the file names for them."""
    if class_name(cache) in COMPOSITES:
        for member, (inner, name) in zip(cache.caches, state, strict=True):
            if name != type(member).__name__:
                raise BadSession(f"it has a {str(name)[:40]!r} where the model has a {type(member).__name__}")
            _fill(member, inner)
        return
    if isinstance(layout_for(cache), Recurrent) and any(rest is not None for rest in state[1:]):
        raise BadSession("its recurrent state belongs to a batch")
    cache.state = tuple(tuple(part) if isinstance(part, list) and not _is_slots(cache) else part for part in state)


def _is_slots(cache: Leaf) -> bool:
    return isinstance(layout_for(cache), Recurrent)


def _check_leaf(index: int, leaf: Leaf, known: Leaf, position: int) -> None:
    """A leaf is the model's if its rows are those it needs at the position, each like one the model makes."""
    kind, own_kind = layout_for(leaf), layout_for(known)
    if kind is not own_kind or kind.signature(leaf) != own_kind.signature(known):
        raise BadSession(f"leaf {index} is {kind.signature(leaf)}, the model's is {own_kind.signature(known)}")
    if isinstance(kind, Recurrent):
        state, mine = kind.checkpoint(leaf), kind.checkpoint(known)
        if [_like(slot) for slot in state] != [_like(slot) for slot in mine]:
            raise BadSession(f"leaf {index} has other recurrent state than the model's")
        return
    held, own = kind.held(leaf), kind.held(known)
    if held is not None and not all(type(number) is int for number in (held.sink, held.first, held.stop)):
        raise BadSession(f"leaf {index} has arrays for numbers")
    if held is None or own is None or held.stop != position:
        raise BadSession(f"leaf {index} stands at {held.stop if held else 0}, the tokens end at {position}")
    needs, rows = kind.needs(leaf, position), held.sink + held.stop - held.first
    if held.first > max(needs.first, needs.sink) or not 0 <= held.sink <= held.first <= held.stop:
        raise BadSession(f"leaf {index} lacks rows that it needs at {position}")
    for array, mine_too in zip(held.arrays, own.arrays, strict=True):
        _check_rows(index, array, mine_too, rows)
    if held.first == own.first == 0:
        _check_numbers(index, held.arrays, own.arrays, min(own.stop, position))


def _check_rows(index: int, array: mx.array, own: mx.array, rows: int) -> None:
    same = array.dtype == own.dtype and array.ndim == own.ndim == 4
    if not same or (*array.shape[:2], array.shape[3]) != (*own.shape[:2], own.shape[3]) or array.shape[2] < rows:
        raise BadSession(f"leaf {index} has {array.dtype} of {array.shape}, the model's are {own.dtype} of {own.shape}")


def _check_numbers(index: int, arrays: Sequence[mx.array], own: Sequence[mx.array], rows: int) -> None:
    for array, mine in zip(arrays, own, strict=True):
        if not mx.issubdtype(array.dtype, mx.floating):
            continue  # packed: it cannot be compared number by number
        there, here = (x[..., :rows, :].astype(mx.float32) for x in (array, mine))
        is_same = mx.abs(there - here).max() <= SAME * mx.maximum(1.0, mx.abs(here).max())
        if not is_same.item():  # nor where one is no number
            raise BadSession(f"leaf {index} has other numbers for the first tokens than this model computes")


def _like(slot: mx.array | None) -> object:
    return None if slot is None else (slot.dtype, slot.shape)


def _short(names: Sequence[str]) -> str:
    return ", ".join(sorted({name[:40] for name in names})[:5]) or "nothing"
