"""Where a picture's bytes come from: the message itself, a file below an allowed folder, or, where allowed, the web.

Pure functions for a worker thread. What a message names is somebody else's word: a path is followed to where it really
leads before it is compared with the allowed folders, and then opened step by step without following anything more.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from omlxd.engine.api import Unsupported
from omlxd.engine.image_policy import ImagePolicy, PictureError

# How the four formats begin in base64. Asked for before a path is, because a JPEG's "/9j/" looks like one.
_BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a link that was changed while it was followed"),
)


def encoded(source: str, policy: ImagePolicy) -> bytes:
    """The file that `source` names, as it is. Raises PictureError, and Unsupported for what the policy forbids."""
    if source.startswith(_BASE64_STARTS):
        return _checked(_from_base64(source, policy), policy)
    found = _SCHEME.match(source)
    scheme = found[1].lower() if found else ""
    if scheme == "data":
        return _checked(_from_data_url(source, policy), policy)
    if scheme in ("http", "https"):
        return _checked(_from_web(source, policy), policy)
    if scheme == "file":
        return _checked(_from_file(_path_of(source), policy), policy)
    if source.startswith(("/", "~/")):
        return _checked(_from_file(os.path.expanduser(source), policy), policy)
    if _BASE64.fullmatch(source):
        return _checked(_from_base64(source, policy), policy)
    raise PictureError(
        f"{_shown(source)} is neither a data: URL, base64, a web address nor a path that begins with / or ~/"
    )


def _checked(data: bytes, policy: ImagePolicy) -> bytes:
    if len(data) > policy.max_bytes:
        raise PictureError(f"has {len(data)} bytes; {_most(policy)}")
    return data


def _most(policy: ImagePolicy) -> str:
    return f"the most is {policy.max_bytes}; send a smaller file"


def _from_data_url(source: str, policy: ImagePolicy) -> bytes:
    head, comma, body = source.partition(",")
    if not comma:
        raise PictureError("is a data: URL without a comma; write data:image/png;base64,...")
    if not head.lower().rstrip().endswith(";base64"):
        raise PictureError("is a data: URL that is not in base64; write data:image/png;base64,...")
    return _from_base64(unquote(body) if "%" in body else body, policy)


def _from_base64(text: str, policy: ImagePolicy) -> bytes:
    if len(text) // 4 * 3 > 2 * policy.max_bytes:  # far too long, line breaks included: not worth decoding
        raise PictureError(f"has {len(text)} characters of base64; {_most(policy)}")
    plain = "".join(text.split()).replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError) as exc:
        raise PictureError(f"is not valid base64 ({exc}); send it again") from None


def _from_web(source: str, policy: ImagePolicy) -> bytes:
    if not policy.allow_urls:
        raise Unsupported(
            "a picture from the web", "images.allow_urls is false; set it, or send the picture as a data: URL"
        )
    from omlxd.engine.image_fetch import Fetcher  # brings TLS in, which few daemons ever need

    try:
        return Fetcher(max_bytes=policy.max_bytes).fetch(source)
    except PictureError as exc:
        raise PictureError(f"{_shown(source)} {exc.reason}") from None


def _path_of(source: str) -> str:
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise PictureError(f"{_shown(source)} names no file of this machine; write file:///path")
    return unquote(parts.path)


def _from_file(path: str, policy: ImagePolicy) -> bytes:
    if "\0" in path:
        raise PictureError("has a NUL in its path")
    try:
        real = os.path.realpath(path)
        root = _root_of(real, policy)
        return _read(root, os.path.relpath(real, root), _shown(path), policy)
    except UnicodeEncodeError:
        raise PictureError(f"{_shown(path)} is no path: it has half of a surrogate pair") from None
    except OSError as exc:
        raise PictureError(f"{_shown(path)} cannot be read: {exc.strerror}") from None


def _root_of(real: str, policy: ImagePolicy) -> str:
    """The allowed folder that holds the file. Whether there is such a file is not told of any other folder."""
    for folder in policy.allow_paths:
        root = os.path.realpath(folder)
        if os.path.commonpath([root, real]) == root:
            return root
    raise Unsupported(
        "a picture from this path",
        "it is below none of the folders in images.allow_paths; add its folder, or send the picture as a data: URL",
    )


def _read(root: str, relative: str, shown: str, policy: ImagePolicy) -> bytes:
    *folders, name = Path(relative).parts or (".",)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Before it is opened: opening a device can already do something.
        _check_kind(os.stat(name, dir_fd=folder, follow_symlinks=False), shown, policy)
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    with os.fdopen(file, "rb") as opened:
        _check_kind(os.fstat(file), shown, policy)
        return opened.read(policy.max_bytes + 1)


def _check_kind(found: os.stat_result, shown: str, policy: ImagePolicy) -> None:
    for is_kind, name in _KINDS:
        if is_kind(found.st_mode):
            raise PictureError(f"{shown} is {name}, not a file")
    if found.st_size > policy.max_bytes:
        raise PictureError(f"{shown} has {found.st_size} bytes; {_most(policy)}")


def _shown(source: str) -> str:
    return repr(source if len(source) <= 200 else source[:200] + "...")
