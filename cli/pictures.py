"""Pictures on the command line: files read here and sent inside the message, so that the daemon needs no way to them.

Only what can be seen from the file's first bytes is checked; whether it is whole is the daemon's to say. Main thread.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Sequence

from omlxd.cli.errors import UsageError
from omlxd.cli.generation import checked
from omlxd.cli.parser import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_BYTES = 64 << 20  # what the daemon takes of one picture
_KINDS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
)


def add_image_flag(parser: Parser) -> None:
    """Declares --image, which `given.image` has as a list or None."""
    parser.add_argument(
        "--image",
        action="append",
        metavar="FILE",
        help="show the model a picture (PNG, JPEG, WebP or GIF) before the prompt; may be repeated",
    )


def content_with(text: str, pictures: Sequence[str]) -> str | list[dict[str, Any]]:
    """A user message's content: the pictures, as `picture_url` gives them, and then the text."""
    if not pictures:
        return text
    shown: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    return [*shown, {"type": "text", "text": text}]


def picture_url(file: str, what: str = "--image") -> str:
    """The file as a `data:` URL; a web address stays what it is. Raises UsageError for what is no picture."""
    name = checked(file, what)
    if name.startswith(("http://", "https://")):
        return name
    data = _read(os.path.expanduser(name), f"{what} {name}")
    kind = next((kind for start, kind in _KINDS if data.startswith(start)), None)
    if kind is None:
        raise UsageError(f"{what} {name}: is not a PNG, JPEG, WebP or GIF picture")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _read(path: str, named: str) -> bytes:
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{named}: is not a file")
        if found.st_size > MAX_BYTES:
            raise UsageError(f"{named}: has {found.st_size} bytes; the most is {MAX_BYTES}, scale it down")
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: a NUL, which no process is given but a line typed may have
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{named}: {reason}") from error
