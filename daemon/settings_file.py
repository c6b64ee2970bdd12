"""Changing the settings file: one key for `omlxctl config set`, or the commented default for a new home.

Owns every write to config.toml. Keeps what it did not come to change: comments, order, unknown keys. Writers exclude
each other by a lock beside the file and replace the file whole, so neither a crash nor a second writer can tear it.
Waits while another writer is at work; not for the event loop.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from omlxd.daemon import settings
from omlxd.daemon.settings import ConfigError


def set_key(path: str, key: str, text: str) -> None:
    """Sets `key` to what `text` says. Where there is no file, the commented default becomes one first.

    Raises ConfigError, with the file as it was, when the key is unknown, its value is not one, or the file is not TOML.
    """
    import tomlkit  # nothing else needs it, and the daemon creates the default file on its way to the socket
    from tomlkit.exceptions import TOMLKitError

    value = settings.check(key, text, where="config set")
    with _writing(path) as target:
        try:
            document = tomlkit.parse(_text(target))
        except (TOMLKitError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: is not valid TOML ({error}); nothing was changed, mend it first") from error
        *tables, name = key.split(".")
        table: MutableMapping[str, Any] = document
        for part in tables:
            table = table.setdefault(part, tomlkit.table())
            if not isinstance(table, MutableMapping):
                raise ConfigError(f"{path}: {part} is not a table; nothing was changed, mend it first", key=key)
        table[name] = value
        _replace(target, tomlkit.dumps(document))


def create_default(path: str) -> None:
    """Writes the commented default file where there is no file yet."""
    if os.path.lexists(path):
        return
    with _writing(path) as target:
        if not os.path.lexists(path):
            _replace(target, settings.default_file())


@contextmanager
def _writing(path: str) -> Iterator[str]:
    """Holds the writers' lock and gives the real file: a link into someone's dotfiles stays a link."""
    target = os.path.realpath(path)
    os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
    lock = os.open(f"{target}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield target
    finally:
        os.close(lock)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return settings.default_file()


def _replace(path: str, text: str) -> None:
    new = f"{path}.new"  # one name: what a crash leaves is written over by the next writer
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(new, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    _sync_directory(os.path.dirname(path))


def _sync_directory(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
