"""A session's file from whoever may have written it: taken for what it is, or refused; nothing else ever happens."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from omlxd.cache.keys import MediaSpan
from omlxd.engine.session_file import BadSession, caches_of, read, write
from tests.cache.running import PLENTY, model, new_cache, prompt
from tests.models import MODELS

TOKENS = prompt(40)
SAMPLE = 16
EXAMPLES = 40  # a thousand of each layout were run when this was written

Parts = tuple[dict[str, Any], bytes]  # a safetensors file's header and payload


@cache
def exported(name: str) -> bytes:
    caches = make_prompt_cache(model(name))
    mx.eval(model(name)(mx.array(TOKENS)[None], cache=caches))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        write(path, caches, TOKENS)
        return path.read_bytes()


@cache
def sample(name: str) -> list[Any]:
    caches = make_prompt_cache(model(name))
    mx.eval(model(name)(mx.array(TOKENS[:SAMPLE])[None], cache=caches))
    return list(caches)


class File(bytes):
    """So many bytes that nobody wants to see them in a failure's report."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


def parts(data: bytes) -> Parts:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def whole(header: dict[str, Any], payload: bytes) -> bytes:
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + payload


def taken_in(name: str, data: bytes) -> None:
    """As an import does it, and a request after it. Raises BadSession for a file that is refused."""
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(data)
        file.flush()
        content = read(Path(file.name), PLENTY)
    store = new_cache(name)
    caches = caches_of(content, sample(name), store.fresh())
    store.checkpoint(content.tokens, caches, len(content.tokens))
    store.check()
    hit = store.lookup([*content.tokens, 7])
    mx.eval(model(name)(mx.array([[7]]), cache=hit.caches))
    hit.release()


@pytest.mark.parametrize("name", MODELS)
def test_what_was_written_is_taken_in(name):
    taken_in(name, exported(name))


NUMBERS = st.one_of(st.sampled_from([-1, 0, 1, 7, 39, 41, 2**31 - 1, -(2**31), 2**40, 2**63]), st.integers(0, 300))
NAMES = st.one_of(
    st.sampled_from(["", ".", "0", "0.0", "1.0", "99", "0.0.0", "0.2", "x", "00.0", "0.0.0.0.0.0.0.0.0.0.0"]),
    st.text(max_size=6),
    NUMBERS.map(str),
    NUMBERS.map(lambda number: f"{number}.0"),
)
VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS, NAMES, st.floats(allow_nan=False)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
TYPES = st.sampled_from(["F32", "F16", "BF16", "I32", "I64", "U8", "BOOL", "F64", "", "I8"])


@st.composite
def mutants(draw: st.DrawFn, name: str) -> bytes:
    return File(draw(draw(st.sampled_from([torn, misdescribed, misshapen, misshapen]))(name)))


@st.composite
def torn(draw: st.DrawFn, name: str) -> bytes:
    """Some bytes are others, in the header or just after it."""
    data = exported(name)
    at, more = draw(st.integers(0, 3000)) % len(data), draw(st.binary(max_size=9))
    return data[:at] + more + data[at + draw(st.integers(0, 9)) :]


@st.composite
def misdescribed(draw: st.DrawFn, name: str) -> bytes:
    """The header says something else than the payload has."""
    header, payload = parts(exported(name))
    said = header["__metadata__"]
    for _ in range(draw(st.integers(1, 3))):
        described = [key for key, each in header.items() if key != "__metadata__" and isinstance(each, dict)]
        key = draw(st.sampled_from(described))
        what = draw(st.integers(0, 5))
        if what == 0:
            header[draw(NAMES)] = draw(st.sampled_from([header[key], header.pop(key), draw(VALUES)]))
        elif what == 1:
            header[key] = {**header[key], "dtype": draw(TYPES)}
        elif what == 2:
            header[key] = {**header[key], "shape": draw(st.lists(NUMBERS, max_size=5))}
        elif what == 3:
            header[key] = {**header[key], "data_offsets": draw(st.lists(NUMBERS, min_size=1, max_size=3))}
        elif what == 4:
            said[draw(st.sampled_from(sorted(said)))] = draw(NAMES)
        else:
            said[draw(NAMES)] = draw(NAMES)
    return whole(header, payload)


@st.composite
def misshapen(draw: st.DrawFn, name: str) -> bytes:
    """A file whose header fits its payload, with arrays, scalars and tokens that no model made."""
    header, payload = parts(exported(name))
    said = header.pop("__metadata__")
    arrays = {
        key: (each["dtype"], each["shape"], payload[slice(*each["data_offsets"])]) for key, each in header.items()
    }
    for _ in range(draw(st.integers(1, 2))):
        key = draw(st.sampled_from(sorted(arrays)))
        dtype, shape, data = arrays[key]
        what = draw(st.integers(0, 5))
        if not shape:
            value = draw(NUMBERS) % 2**63
            dtype, data = draw(
                st.sampled_from([("I32", value.to_bytes(8, "little")[:4]), ("I64", value.to_bytes(8, "little"))])
            )
        elif what == 0:
            shape = draw(st.permutations(shape))
        elif what == 1:
            dtype = draw(st.sampled_from(["F32", "I32", "U32"])) if dtype == "F32" else dtype
        elif what == 2 and shape[0] == 1 and len(shape) > 2:  # fewer rows, or more, of what may be tokens
            rows = draw(st.integers(0, 60))
            one = len(data) // max(1, shape[2])
            shape, data = [*shape[:2], rows, *shape[3:]], (data * 60)[: one * rows]
        elif what == 3:
            data = draw(st.binary(min_size=4, max_size=4)) * (len(data) // 4) + data[len(data) // 4 * 4 :]
        elif what == 4:
            shape = [1, *shape] if draw(st.booleans()) else shape[1:] if shape[0] == 1 else shape
        else:
            tokens = draw(st.lists(st.integers(0, 319), min_size=1, max_size=60))
            said["0.tokens"] = b"".join(token.to_bytes(4, "little") for token in tokens).hex()
        arrays[key] = (dtype, list(shape), data)
    header, payload = {"__metadata__": said}, b""
    for key, (dtype, shape, data) in arrays.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(payload), len(payload) + len(data)]}
        payload += data
    return whole(header, payload)


@pytest.mark.parametrize("name", MODELS)
def test_any_file_is_taken_in_or_refused(name):
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(mutants(name))
    def refuse_or_take(data: bytes) -> None:
        with contextlib.suppress(BadSession):
            taken_in(name, data)

    refuse_or_take()


def peak_bytes(data: bytes) -> int:
    """What looking at a refused file takes of Python's memory and mlx's."""
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tracemalloc.start()
    try:
        with pytest.raises(BadSession):
            taken_in("llama", data)
        return tracemalloc.get_traced_memory()[1] + mx.get_peak_memory() - before
    finally:
        tracemalloc.stop()


def test_a_list_that_says_it_is_long_takes_no_memory():
    header, payload = parts(exported("llama"))
    header["__metadata__"]["1.300000000"] = "KVCache"
    assert peak_bytes(whole(header, payload)) < 16 * len(exported("llama"))
    header, payload = parts(exported("llama"))
    header["300000000.0"] = header.pop("1.0")
    assert peak_bytes(whole(header, payload)) < 16 * len(exported("llama"))


def test_arrays_that_share_their_bytes_take_no_more_than_the_file():
    header, payload = parts(exported("llama"))
    for number in range(1000):
        header[f"x{number}"] = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}
    data = whole(header, payload)
    assert peak_bytes(data) < 16 * len(data)


def test_what_is_no_plain_file_is_not_read(tmp_path):
    pipe, device = tmp_path / "pipe.safetensors", tmp_path / "zero.safetensors"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for path in (pipe, device):
        with pytest.raises(BadSession, match="no plain file"):
            read(path, PLENTY)


def _with_pictures(tmp_path: Path, *pictures: MediaSpan) -> Path:
    path = tmp_path / "pictures.safetensors"
    caches = make_prompt_cache(model("llama"))
    mx.eval(model("llama")(mx.array(TOKENS)[None], cache=caches))
    write(path, caches, TOKENS, pictures)
    return path


def test_a_file_says_which_tokens_stand_for_which_pictures(tmp_path: Path) -> None:
    pictures = [MediaSpan(5, 9, bytes(range(32))), MediaSpan(9, 30, bytes(32))]
    content = read(_with_pictures(tmp_path, *pictures), PLENTY)
    assert content.pictures == pictures
    assert content.sample == TOKENS[:5]  # nobody here has the picture to compute more
    (tmp_path / "pictures.safetensors").unlink()
    assert read(_with_pictures(tmp_path), PLENTY).pictures == []


@pytest.mark.parametrize(
    "picture",
    [
        MediaSpan(1, 9, bytes(32)),  # fewer than two tokens before it
        MediaSpan(5, 41, bytes(32)),  # beyond the tokens
        MediaSpan(9, 9, bytes(32)),
        MediaSpan(5, 9, bytes(31)),
    ],
)
def test_a_picture_that_cannot_be_is_refused(tmp_path: Path, picture: MediaSpan) -> None:
    with pytest.raises(BadSession, match="of 40 tokens"):
        read(_with_pictures(tmp_path, picture), PLENTY)


def test_pictures_that_overlap_or_are_too_many_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSession, match="of 40 tokens"):
        read(_with_pictures(tmp_path, MediaSpan(5, 9, bytes(32)), MediaSpan(8, 12, bytes(32))), PLENTY)
    (tmp_path / "pictures.safetensors").unlink()
    with pytest.raises(BadSession, match="more than 4096 pictures"):
        read(_with_pictures(tmp_path, *[MediaSpan(5, 9, b"")] * 4097), PLENTY)
