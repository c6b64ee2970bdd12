"""Pictures: what a message names is read, checked by its header, and decoded to upright RGB pixels with their digest.

Pure functions for a worker thread; `engine.image_sources` says where the bytes come from. Pixels are decoded as mlx-vlm
decodes them, so that a model sees here what it sees there: the first frame, turned as EXIF says, without its alpha.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from typing import Final

from PIL import Image, ImageOps
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from omlxd.engine.image_policy import ImagePolicy, PictureError
from omlxd.engine.image_sources import encoded

# What Pillow raises over bytes that are no picture, or only the beginning of one.
DECODING_FAILURES = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    ArithmeticError,
    AssertionError,
    struct.error,
    zlib.error,
)
# Opened by these and not by Image.open, which warns of bombs by a limit of its own; only their headers are read here.
_OPENERS: Final[tuple[tuple[bytes, Callable[[BytesIO], ImageFile]], ...]] = (
    (b"\x89PNG\r\n\x1a\n", PngImageFile),
    (b"\xff\xd8\xff", JpegImageFile),
    (b"GIF8", GifImageFile),
    (b"RIFF", WebPImageFile),
)
# What people send besides; at this offset of the file.
_OTHERS: Final = (
    (4, b"ftypheic", "HEIC"),
    (4, b"ftypmif1", "HEIC"),
    (4, b"ftypavif", "AVIF"),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"%PDF", "PDF"),
    (0, b"<svg", "SVG"),
    (0, b"<", "a text with markup"),
)
# A progressive JPEG has about ten; each costs a pass over all pixels, and an empty one no more than some bytes.
_MAX_SCANS, _SCAN = 100, b"\xff\xda"
_TAKEN = "PNG, JPEG, WebP or GIF"


@dataclass(frozen=True, slots=True)
class Picture:
    """Decoded: `image` is RGB and upright, never changed in place; `digest` (32 bytes) tells its pixels and size."""

    digest: bytes
    image: Image.Image

    @property
    def num_pixels(self) -> int:
        return self.image.width * self.image.height


class Opened:
    """A picture whose header has been read and whose pixels have not."""

    def __init__(self, data: bytes) -> None:
        """Raises PictureError for what is no picture."""
        self._file = _opened(data)
        self.width, self.height = self._file.size
        if self.width < 1 or self.height < 1:
            raise PictureError(f"is {self.width} x {self.height} pixels; a picture has one at least")

    @property
    def num_pixels(self) -> int:
        return self.width * self.height

    def decoded(self) -> Picture:
        """Once: the file is let go. Raises PictureError for pixels that are damaged or not all there."""
        try:
            self._file.load()
            image = _rgb(_upright(self._file))
        except DECODING_FAILURES as exc:
            raise PictureError(f"cannot be decoded, it is damaged or cut off ({exc}); send it again") from None
        finally:
            self._file.close()
        return Picture(digest_of(image), image)


def open_picture(source: str, policy: ImagePolicy) -> Opened:
    """Reads the bytes and of them no more than the header. Raises PictureError, Unsupported."""
    opened = Opened(encoded(source, policy))
    if opened.num_pixels > policy.max_pixels:
        raise PictureError(
            f"is {opened.width} x {opened.height}, {opened.num_pixels} pixels; {_most(policy.max_pixels)}"
        )
    return opened


def digest_of(image: Image.Image) -> bytes:
    """The 32 bytes that stand for an RGB image's pixels wherever they came from."""
    hashed = blake2b(struct.pack("<3sII", b"RGB", image.width, image.height), digest_size=32)
    hashed.update(image.tobytes())
    return hashed.digest()


def _opened(data: bytes) -> ImageFile:
    opener = next((opener for start, opener in _OPENERS if data.startswith(start)), None)
    if opener is None:
        raise PictureError(f"is {_what(data)}; send {_TAKEN}")
    if opener is JpegImageFile and data.count(_SCAN) > _MAX_SCANS:
        raise PictureError(f"has {data.count(_SCAN)} scans; the most is {_MAX_SCANS}, save it again")
    try:
        return opener(BytesIO(data))
    except Image.DecompressionBombError as exc:  # a WebP's size is checked as it is opened
        raise PictureError(f"is too large ({exc})") from None
    except DECODING_FAILURES as exc:
        raise PictureError(f"cannot be read as {_TAKEN} ({exc}); send it again") from None


def _what(data: bytes) -> str:
    if not data:
        return "empty"
    head = data.lstrip()[:64] if data[:1].isspace() else data
    for offset, mark, name in _OTHERS:
        if head.startswith(mark, offset):
            return name
    return f"no picture that is known here (it begins with {data[:8].hex(' ')})"


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except DECODING_FAILURES:
        return image.copy()  # metadata that cannot be read says nothing about the pixels, which are there


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # converted as it is, every value over 255 would be white
        image = image.point(lambda value: value * (1 / 256))
    image.info.pop("transparency", None)  # left out as mlx-vlm leaves it out; Pillow would warn that it is
    return image.convert("RGB")


def _most(max_pixels: int) -> str:
    return f"the most is {max_pixels} (images.max_pixels); scale it down"
