"""Pictures as they reach a model: which are taken, from where, and what is said of the others."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_vlm.utils import load_image
from PIL import Image

from omlxd.engine.api import Unsupported
from omlxd.engine.image_policy import ImagePolicy, PictureError
from omlxd.engine.images import Picture, open_picture

OPEN = ImagePolicy()


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels, mode=None).convert(mode)


def file_of(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64_of(data)}"


def read_picture(source: str, policy: ImagePolicy) -> Picture:
    return open_picture(source, policy).decoded()


def read(data: bytes, policy: ImagePolicy = OPEN) -> Picture:
    return read_picture(data_url(data), policy)


def as_mlx_vlm_reads(data: bytes) -> Image.Image:
    image: Image.Image = load_image(BytesIO(data))
    return image


def refusal(source: str | bytes, policy: ImagePolicy = OPEN) -> str:
    with pytest.raises(PictureError) as refused:
        read_picture(source if isinstance(source, str) else data_url(source), policy)
    return refused.value.reason


def png_of_size(width: int, height: int) -> bytes:
    """A whole PNG file that says it is of this size and has the pixels of no size."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


# -- what is taken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_picture_is_decoded_as_mlx_vlm_decodes_it(format: str) -> None:
    data = file_of(noise(13, 7), format)
    picture = read(data)
    assert picture.image.mode == "RGB"
    assert picture.image.tobytes() == as_mlx_vlm_reads(data).tobytes()


@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")  # of mlx-vlm's own reading
@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1"])
def test_every_kind_of_pixel_becomes_rgb_as_in_mlx_vlm(mode: str) -> None:
    data = file_of(noise(9, 5, "RGBA").convert(mode))
    assert read(data).image.tobytes() == as_mlx_vlm_reads(data).tobytes()


def test_a_cmyk_jpeg_becomes_rgb_as_in_mlx_vlm() -> None:
    data = file_of(noise(16, 16).convert("CMYK"), "JPEG")
    assert read(data).image.tobytes() == as_mlx_vlm_reads(data).tobytes()


def test_a_grey_picture_of_16_bits_keeps_its_shades() -> None:
    shades = Image.fromarray(np.array([[0, 0x4000, 0x8000, 0xFF00]], dtype=np.uint16))
    pixels = np.asarray(read(file_of(shades)).image)
    assert pixels[0, :, 0].tolist() == [0, 0x40, 0x80, 0xFF]


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_of_a_film_the_first_frame_is_taken(format: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    film = file_of(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)
    assert read(film).image.getpixel((4, 4)) == (255, 0, 0)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_stands_as_its_exif_says(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(noise(12, 8), format, exif=exif)
    image = read(data).image
    assert image.size == ((12, 8) if orientation <= 4 else (8, 12))
    assert image.tobytes() == as_mlx_vlm_reads(data).tobytes()


def test_exif_that_cannot_be_read_turns_nothing() -> None:
    image = noise(12, 8)
    assert read(file_of(image, exif=b"Exif\0\0no TIFF at all")).image.tobytes() == image.tobytes()


# -- from where -------------------------------------------------------------------------------------------------------


def test_the_same_picture_has_one_digest_from_every_source(tmp_path: Path) -> None:
    data = file_of(noise(20, 10))
    path = tmp_path / "a picture.png"
    path.write_bytes(data)
    policy = ImagePolicy(allow_paths=(str(tmp_path),))
    sources = [
        str(path),
        path.as_uri(),
        base64_of(data),
        data_url(data),
        data_url(data, "image/jpeg;charset=utf-8"),
        data_url(data).replace("+", "%2B").replace("=", "%3D"),
        base64_of(data).rstrip("="),
        base64.encodebytes(data).decode(),
        base64.urlsafe_b64encode(data).decode(),
    ]
    assert len({read_picture(source, policy).digest for source in sources}) == 1


def test_the_digest_tells_pixels_and_not_files() -> None:
    image = noise(20, 10)
    assert read(file_of(image)).digest == read(file_of(image, "WEBP", lossless=True)).digest
    assert len(read(file_of(image)).digest) == 32


def test_other_pixels_or_another_size_have_another_digest() -> None:
    flat = [Image.new("RGB", size) for size in ((4, 9), (9, 4), (6, 6))]
    assert len({read(file_of(image)).digest for image in [*flat, noise(6, 6), noise(6, 6, seed=1)]}) == 5


def test_a_jpeg_in_base64_is_not_taken_for_a_path() -> None:
    text = base64_of(file_of(noise(8, 8), "JPEG"))
    assert text.startswith("/9j/")
    assert read_picture(text, OPEN).image.size == (8, 8)


def test_a_path_below_the_home_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.png").write_bytes(file_of(noise(3, 3)))
    assert read_picture("~/a.png", ImagePolicy(allow_paths=(str(tmp_path),))).image.size == (3, 3)


@pytest.mark.parametrize("path", ["/nowhere/a.png", "/etc/passwd", "{0}/../b.png", "{0}2/a.png", "file:///b.png"])
def test_a_path_outside_of_the_allowed_folders_is_refused_whether_it_is_there_or_not(path: str, tmp_path: Path) -> None:
    root = tmp_path / "a"
    root.mkdir()
    for place in (tmp_path / "b.png", tmp_path / "a2" / "a.png"):
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(file_of(noise(3, 3)))
    with pytest.raises(Unsupported, match=r"images\.allow_paths"):
        read_picture(path.format(root), ImagePolicy(allow_paths=(str(root),)))


def test_by_default_no_path_is_read() -> None:
    with pytest.raises(Unsupported, match=r"images\.allow_paths"):
        read_picture("/a.png", OPEN)


def test_a_link_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    for folder in (root, away):
        folder.mkdir()
        (folder / "a.png").write_bytes(file_of(noise(3, 3)))
    (root / "within.png").symlink_to(root / "a.png")
    (root / "out.png").symlink_to(away / "a.png")
    (root / "out").symlink_to(away)
    policy = ImagePolicy(allow_paths=(str(root),))
    assert read_picture(str(root / "within.png"), policy).image.size == (3, 3)
    for name in ("out.png", "out/a.png"):
        with pytest.raises(Unsupported, match=r"images\.allow_paths"):
            read_picture(str(root / name), policy)


def test_an_allowed_folder_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.png").write_bytes(file_of(noise(3, 3)))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read_picture(str(tmp_path / "link" / "a.png"), ImagePolicy(allow_paths=(str(tmp_path / "link"),)))


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening one for reading would wait for a writer
    policy = ImagePolicy(allow_paths=(str(tmp_path), "/dev"))
    assert "a named pipe, not a file" in refusal(str(tmp_path / "pipe"), policy)
    assert "a device, not a file" in refusal("/dev/zero", policy)
    assert "a folder, not a file" in refusal(str(tmp_path), policy)


def test_a_file_that_is_not_there_or_not_readable_is_refused_with_the_reason(tmp_path: Path) -> None:
    policy = ImagePolicy(allow_paths=(str(tmp_path),))
    assert "No such file" in refusal(str(tmp_path / "a.png"), policy)
    (tmp_path / "a").touch()
    assert "Not a directory" in refusal(str(tmp_path / "a" / "b.png"), policy)
    assert "NUL" in refusal(f"{tmp_path}/a\0.png", policy)
    assert "surrogate" in refusal(f"{tmp_path}/\ud800.png", policy)


@pytest.mark.parametrize("url", ["https://example.com/a.png", "HTTP://127.0.0.1/a.png"])
def test_nothing_is_fetched_unless_the_settings_allow_it(url: str) -> None:
    with pytest.raises(Unsupported, match=r"images\.allow_urls"):
        read_picture(url, OPEN)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "neither"),
        ("pictures/a.png", "a path that begins with /"),
        ("ftp://example.com/a.png", "neither"),
        ("file://elsewhere/a.png", "names no file of this machine"),
        ("data:image/png;base64", "without a comma"),
        ("data:image/svg+xml,<svg/>", "not in base64"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,A*==", "not valid base64"),
        ("iVBORw0KGgoAA\u00e4", "not valid base64"),
        ("AAAA", "no picture that is known here (it begins with 00 00 00)"),
    ],
)
def test_another_source_is_refused_with_what_to_send(source: str, reason: str) -> None:
    assert reason in refusal(source)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\0\0\0\x18ftypheic", "HEIC"),
        (b"\0\0\0\x18ftypavif", "AVIF"),
        (b"BM123456", "BMP"),
        (b"II*\0", "TIFF"),
        (b"%PDF-1.7", "PDF"),
        (b"\n <svg xmlns=''>", "SVG"),
        (b"<html>", "markup"),
        (b"hello", "68 65 6c 6c 6f"),
    ],
)
def test_another_format_is_refused_by_its_name(data: bytes, name: str) -> None:
    reason = refusal(data)
    assert name in reason
    assert "send PNG, JPEG, WebP or GIF" in reason


def test_a_declared_type_is_not_believed() -> None:
    assert read_picture(data_url(file_of(noise(4, 4)), "application/pdf"), OPEN).image.size == (4, 4)
    assert "PDF" in refusal(data_url(b"%PDF-1.7", "image/png"))


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_a_picture_without_pixels_is_refused(size: tuple[int, int]) -> None:
    assert refusal(png_of_size(*size))


def test_a_bomb_is_refused_by_its_header_with_both_numbers() -> None:
    bomb = png_of_size(60_000, 60_000)
    assert len(bomb) < 200
    reason = refusal(bomb)
    assert "3600000000 pixels" in reason
    assert "the most is 40000000 (images.max_pixels)" in reason


def with_canvas(webp: bytes, width: int, height: int) -> bytes:
    """A still WebP (RIFF, WEBP, VP8L) that says it is of this size."""
    bits = (width - 1) | (height - 1) << 14
    return webp[:21] + struct.pack("<I", bits) + webp[25:]


@pytest.mark.parametrize(
    "bomb",
    [
        with_canvas(file_of(noise(4, 4), "WEBP", lossless=True), 16384, 16384),
        with_canvas(file_of(noise(4, 4), "WEBP", lossless=True), 10000, 10000),
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + file_of(noise(4, 4), "GIF")[10:],
        file_of(noise(8, 8), "JPEG").replace(struct.pack(">HH", 8, 8), struct.pack(">HH", 65500, 65500), 1),
    ],
    ids=["webp, over Pillow's limit", "webp", "gif", "jpeg"],
)
def test_a_bomb_of_any_format_is_refused_before_its_pixels(bomb: bytes) -> None:
    reason = refusal(bomb)
    assert "pixels" in reason
    assert "damaged" not in reason


def test_a_jpeg_of_endless_scans_is_refused_by_their_number() -> None:
    whole = file_of(noise(64, 64, "L"), "JPEG", progressive=True)
    scan = whole[whole.rfind(b"\xff\xda") : -2]  # at 40 million pixels each would take 30 ms, for 65 bytes
    assert read(whole[:-2] + 80 * scan + whole[-2:]).image.size == (64, 64)
    assert "the most is 100" in refusal(whole[:-2] + 100 * scan + whole[-2:])


def test_a_picture_of_the_most_pixels_is_taken_and_one_more_is_not() -> None:
    policy = ImagePolicy(max_pixels=12)
    assert read(file_of(noise(4, 3)), policy).num_pixels == 12
    assert "13 x 1, 13 pixels; the most is 12" in refusal(file_of(noise(13, 1)), policy)


def test_a_file_over_the_bytes_is_refused_from_every_source(tmp_path: Path) -> None:
    data = file_of(noise(30, 30))
    path = tmp_path / "a.png"
    path.write_bytes(data)
    policy = ImagePolicy(allow_paths=(str(tmp_path),), max_bytes=len(data) - 1)
    for source in (str(path), data_url(data), base64_of(data)):
        assert f"has {len(data)} bytes; the most is {len(data) - 1}" in refusal(source, policy)
    assert "characters of base64" in refusal("A" * 12 * len(data), policy)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_a_picture_that_is_cut_off_is_refused(format: str) -> None:
    data = file_of(noise(64, 64), format)
    for length in (4, 11, 40, len(data) // 2, len(data) * 3 // 4):
        assert refusal(data[:length])


FILES = [file_of(noise(17, 9), format) for format in ("PNG", "JPEG", "WEBP", "GIF")]
FILES += [file_of(noise(17, 9), "JPEG", progressive=True, exif=b"Exif\0\0II*\0\x08\0\0\0\0\0")]


# Pillow warns of metadata that it skips.
skips_metadata = pytest.mark.filterwarnings("ignore:.*EXIF data:UserWarning", "ignore:.*metadata:UserWarning")


def answered(data: bytes) -> None:
    """Read or refused; anything else that is raised is a fault."""
    with suppress(PictureError):
        assert read(data, ImagePolicy(max_pixels=10_000)).num_pixels <= 10_000


@skips_metadata
@given(st.sampled_from(FILES), st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=8))
def test_no_damage_is_worse_than_a_refusal(file: bytes, damage: list[tuple[int, int]]) -> None:
    data = bytearray(file)
    for place, value in damage:
        data[place % len(data)] = value
    answered(bytes(data))


@skips_metadata
@given(st.sampled_from([file[:12] for file in FILES]), st.binary(max_size=200))
def test_bytes_that_only_begin_like_a_picture_are_refused(start: bytes, rest: bytes) -> None:
    answered(start + rest)


@skips_metadata
@given(st.sampled_from(FILES), st.integers(0, 4000), st.binary(max_size=30))
def test_what_is_cut_and_spliced_is_read_or_refused(file: bytes, cut: int, more: bytes) -> None:
    cut %= len(file)
    answered(file[:cut] + more + file[cut:])


@given(st.text(max_size=60))
def test_any_text_is_a_source_or_refused(text: str) -> None:
    with suppress(PictureError, Unsupported):
        read_picture(text, OPEN)
