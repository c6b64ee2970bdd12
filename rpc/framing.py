"""Framing: where one JSON text ends and the next begins, in both forms that PROTOCOL.md names.

Owns the bytes of a connection that are not yet a frame, and nothing else: no socket, no JSON. Called by the
connection's reader, on the event loop. What it holds is bounded by the frame limit; what is over it is skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol

HEADER_BYTES: Final = 4096
HEAD_BYTES: Final = 1024  # of an oversized frame, enough to find an id that stands in front
_BLANK: Final = b" \t\r\n"
_HEADER_END: Final = re.compile(rb"\r?\n\r?\n")
_BLANKS: Final = re.compile(rb"[ \t\r\n]+")
_DIGITS: Final = re.compile(rb"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Oversized:
    """A frame over the limit. `head` is its beginning; the rest is being skipped and the connection goes on."""

    head: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """Bytes after which nobody can tell where the next frame begins: the connection has to end."""

    reason: str


Frame = bytes | Oversized | Broken


class Framing(Protocol):
    """One way of cutting a stream into frames. `buffer` is shared with the reader, which only appends to it."""

    def take(self, buffer: bytearray) -> Frame | None:
        """Removes and returns the next frame, or None where more bytes are needed."""
        ...

    def finish(self, buffer: bytearray) -> Frame | None:
        """What the end of the stream makes of the bytes that are left."""
        ...

    def is_inside(self, buffer: bytearray) -> bool:
        """Whether a frame has begun and not ended, when all that could be taken is."""
        ...

    def wrap(self, body: bytes) -> bytes:
        """`body`, a JSON text, as it goes over the wire."""
        ...


class Lines:
    """NDJSON: one JSON text per line; blank lines mean nothing."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._limit = max_frame_bytes
        self._scanned = 0  # bytes of the buffer already known to hold no newline
        self._skipping = False

    def take(self, buffer: bytearray) -> Frame | None:
        while (end := buffer.find(b"\n", self._scanned)) >= 0:
            self._scanned = 0
            frame = self._cut(buffer, end, drop=end + 1)
            if frame is not None:
                return frame
        return self._wait(buffer)

    def finish(self, buffer: bytearray) -> Frame | None:
        return self._cut(buffer, len(buffer), drop=len(buffer))

    def is_inside(self, buffer: bytearray) -> bool:
        return self._skipping or _BLANKS.fullmatch(buffer or b" ") is None

    def wrap(self, body: bytes) -> bytes:
        return body + b"\n"

    def _cut(self, buffer: bytearray, end: int, *, drop: int) -> Frame | None:
        skipped, self._skipping = self._skipping, False
        line = b"" if skipped else bytes(buffer[: min(end, self._limit + 1)]).strip(_BLANK)
        del buffer[:drop]
        if len(line) > self._limit:
            return Oversized(line[:HEAD_BYTES])
        return line or None

    def _wait(self, buffer: bytearray) -> Frame | None:
        if self._skipping:
            buffer.clear()
            return None
        self._scanned = len(buffer)
        if len(buffer) <= self._limit:
            return None
        head = bytes(buffer[:HEAD_BYTES])
        buffer.clear()
        self._scanned = 0
        self._skipping = True
        return Oversized(head)


class Headers:
    """LSP's form: a header block with Content-Length, a blank line, the body."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._limit = max_frame_bytes
        self._length: int | None = None  # of the body whose header has been read
        self._skip = 0

    def take(self, buffer: bytearray) -> Frame | None:
        if not self._skipped(buffer):
            return None
        if self._length is None:
            length = self._header(buffer)
            if not isinstance(length, int):
                return length
            self._length = length
        return self._body(buffer, self._length)

    def finish(self, buffer: bytearray) -> Frame | None:
        if self._skip or (self._length is None and not buffer.strip(_BLANK)):
            return None
        return Broken("the stream ended in the middle of a frame")

    def is_inside(self, buffer: bytearray) -> bool:
        return self._length is not None or self._skip > 0 or bool(buffer)

    def wrap(self, body: bytes) -> bytes:
        return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)

    def _skipped(self, buffer: bytearray) -> bool:
        dropped = min(self._skip, len(buffer))
        del buffer[:dropped]
        self._skip -= dropped
        return self._skip == 0

    def _header(self, buffer: bytearray) -> int | Broken | None:
        _drop_blanks(buffer)
        end = _HEADER_END.search(buffer, 0, HEADER_BYTES)
        if end is None:
            if len(buffer) < HEADER_BYTES:
                return None
            return Broken(f"no blank line ends the header within {HEADER_BYTES} bytes")
        block = bytes(buffer[: end.start()])
        del buffer[: end.end()]
        return content_length(block)

    def _body(self, buffer: bytearray, length: int) -> Frame | None:
        if length > self._limit:
            if len(buffer) < min(length, HEAD_BYTES):
                return None
            head = bytes(buffer[: min(length, HEAD_BYTES)])
            self._length, self._skip = None, length
            return Oversized(head)
        if len(buffer) < length:
            return None
        body = bytes(buffer[:length])
        del buffer[:length]
        self._length = None
        return body


def content_length(block: bytes) -> int | Broken:
    """The body length that a header block gives; other fields are allowed and mean nothing to us."""
    for line in block.splitlines():
        name, colon, value = line.partition(b":")
        if not colon:
            return Broken("a header line has no colon")
        if name.strip().lower() == b"content-length":
            digits = value.strip()
            if not _DIGITS.fullmatch(digits):
                return Broken("Content-Length is not a number of bytes")
            return int(digits)
    return Broken("the header has no Content-Length")


def _drop_blanks(buffer: bytearray) -> None:
    if blanks := _BLANKS.match(buffer):
        del buffer[: blanks.end()]


class FrameReader:
    """The frames of one connection. Its first non-blank byte decides the form, for both directions."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._limit = max_frame_bytes
        self._buffer = bytearray()
        self._framing: Framing | None = None

    def feed(self, data: bytes) -> None:
        self._buffer += data
        if self._framing is None:
            self._detect()

    def take(self) -> Frame | None:
        """The next whole frame, or None until more bytes are fed."""
        return self._framing.take(self._buffer) if self._framing else None

    def finish(self) -> Frame | None:
        """The last frame, when the stream has ended: a line may lack its newline."""
        return self._framing.finish(self._buffer) if self._framing else None

    @property
    def is_at_edge(self) -> bool:
        """Whether no frame has begun; to be asked when there is none to take."""
        return self._framing is None or not self._framing.is_inside(self._buffer)

    def wrap(self, body: bytes) -> bytes:
        """`body` framed as the peer frames."""
        framing = self._framing or Lines(self._limit)
        return framing.wrap(body)

    def _detect(self) -> None:
        _drop_blanks(self._buffer)
        if self._buffer:
            # No JSON text begins with C, so anything else may as well be told that it is no JSON, line by line.
            headers = self._buffer[0] in b"Cc"
            self._framing = Headers(self._limit) if headers else Lines(self._limit)
