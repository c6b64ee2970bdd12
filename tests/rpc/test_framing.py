"""Where frames begin and end, whatever the pieces they arrive in."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.rpc.framing import HEADER_BYTES, Broken, Frame, FrameReader, Oversized

LIMIT = 2000


def frames_of(*pieces: bytes, end: bool = False, limit: int = LIMIT) -> list[Frame]:
    reader = FrameReader(limit)
    found: list[Frame] = []
    for piece in pieces:
        reader.feed(piece)
        while (frame := reader.take()) is not None:
            found.append(frame)
            if isinstance(frame, Broken):
                return found
    last = reader.finish() if end else None
    return found if last is None else [*found, last]


def headed(*bodies: bytes) -> bytes:
    return b"".join(b"Content-Length: %d\r\n\r\n%b" % (len(body), body) for body in bodies)


def test_lines_are_frames_and_blank_lines_are_not() -> None:
    assert frames_of(b' \r\n\n{"a":1}\r\n\n  [2]\n{"b"') == [b'{"a":1}', b"[2]"]


def test_the_last_line_needs_no_newline() -> None:
    assert frames_of(b'{"a":1}\n{"b":2}', end=True) == [b'{"a":1}', b'{"b":2}']


def test_what_is_neither_json_nor_a_header_is_read_as_lines() -> None:
    assert frames_of(b"hello\n5\n") == [b"hello", b"5"]


def test_content_length_counts_bytes_and_bodies_may_hold_newlines() -> None:
    body = '{"a":\n"é"}'.encode()
    assert frames_of(headed(body, b"[]")) == [body, b"[]"]


@pytest.mark.parametrize(
    "header",
    [
        b"content-length:2\r\n\r\n",
        b"Content-Length:  2  \r\nContent-Type: application/vscode-jsonrpc; charset=utf-8\r\n\r\n",
        b"Content-Type: x\r\nCONTENT-LENGTH: 2\r\n\r\n",
        b"Content-Length: 2\n\n",
    ],
)
def test_headers_of_any_case_order_and_company_are_read(header: bytes) -> None:
    assert frames_of(header + b"{}" + headed(b"[]")) == [b"{}", b"[]"]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"Content-Type: x\r\n\r\n{}", "no Content-Length"),
        (b"Content-Length: two\r\n\r\n{}", "not a number"),
        (b"Content-Length: -2\r\n\r\n{}", "not a number"),
        (b"Content-Length 2\r\n\r\n{}", "no colon"),
        (b"C" * HEADER_BYTES, "no blank line"),
    ],
)
def test_a_bad_header_breaks_the_stream_and_says_why(header: bytes, reason: str) -> None:
    (frame,) = frames_of(header)
    assert isinstance(frame, Broken)
    assert reason in frame.reason


def test_the_end_of_the_stream_in_a_body_is_told() -> None:
    assert isinstance(frames_of(b"Content-Length: 5\r\n\r\n{}", end=True)[0], Broken)


def test_the_end_of_the_stream_between_frames_is_nothing() -> None:
    assert frames_of(headed(b"{}") + b"\r\n", end=True) == [b"{}"]


def test_a_frame_of_exactly_the_limit_passes() -> None:
    body = b'"' + b"x" * (LIMIT - 2) + b'"'
    assert frames_of(b"{}\n" + body + b"\n") == [b"{}", body]
    assert frames_of(headed(body)) == [body]


def test_an_oversized_line_is_skipped_and_its_head_kept() -> None:
    line = b'{"id":1' + b"x" * LIMIT
    first, second = frames_of(line, b"x" * 9999, b"x\n{}\n")
    assert isinstance(first, Oversized)
    assert first.head.startswith(b'{"id":1')
    assert second == b"{}"


def test_an_oversized_body_is_skipped_by_its_length() -> None:
    first, second = frames_of(headed(b'{"id":1' + b"\n" * 5000, b"{}"))
    assert isinstance(first, Oversized)
    assert first.head.startswith(b'{"id":1')
    assert second == b"{}"


def test_what_is_skipped_is_not_stored() -> None:
    reader = FrameReader(LIMIT)
    reader.feed(b"Content-Length: 99999999999\r\n\r\n" + b"x" * 5000)
    assert isinstance(reader.take(), Oversized)
    for _ in range(100):
        reader.feed(b"y" * 5000)
        assert reader.take() is None
    reader_of_lines = FrameReader(LIMIT)
    reader_of_lines.feed(b"{" + b"x" * 5000)
    assert isinstance(reader_of_lines.take(), Oversized)
    for _ in range(100):
        reader_of_lines.feed(b"y" * 5000)
        assert reader_of_lines.take() is None
    assert reader_of_lines.finish() is None


BODY = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30).map(
    lambda text: b"{" + text.encode() + b"}"
)


@given(bodies=st.lists(BODY, max_size=6), cuts=st.lists(st.integers(0, 400), max_size=20), headers=st.booleans())
def test_frames_do_not_depend_on_how_the_bytes_arrive(bodies: list[bytes], cuts: list[int], headers: bool) -> None:
    stream = headed(*bodies) if headers else b"".join(body + b"\n" for body in bodies)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[start:stop] for start, stop in pairwise(edges)]
    assert frames_of(*pieces) == bodies


def test_answers_are_framed_as_the_client_frames() -> None:
    lines, headers = FrameReader(LIMIT), FrameReader(LIMIT)
    lines.feed(b"{")
    headers.feed(b"c")
    assert lines.wrap(b"[]") == b"[]\n"
    assert headers.wrap(b"[]") == b"Content-Length: 2\r\n\r\n[]"
