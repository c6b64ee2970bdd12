"""The catalog: which models are on this machine, under which names, and which of them can be loaded.

Looks into the given roots each time it is asked, so a folder that came or went is seen at once. Called on a worker
thread by the pool and by `models.list`; keeps no state besides its roots. Imports neither mlx nor transformers.

A root holds models as `NAME/`, as `ORG/NAME/`, or in the Hugging Face cache's form
`models--ORG--NAME/snapshots/REVISION/`; it may itself be a model. A model is named by its path below its root. Where
two roots have the same name, both get their root's label, `NAME@LABEL`, and neither keeps the bare name: which one it
meant would depend on the order of the roots.
"""

from __future__ import annotations

import difflib
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from omlxd.engine.api import ModelLoadFailed, ModelNotFound, Unsupported
from omlxd.engine.model_folder import Defect, Kind, examine, is_model_folder

_HUB_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class Root:
    """A folder that holds models. The label tells apart models of one name; the folder's own name unless given."""

    path: Path
    label: str = ""

    @property
    def tag(self) -> str:
        return self.label or self.path.name


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model. `size_bytes` counts weight files only. `remote_code`: its own Python runs at load, with consent."""

    name: str
    path: Path
    kind: Kind
    size_bytes: int
    remote_code: bool = False
    defect: Defect | None = None

    @property
    def error(self) -> str | None:
        """Why it cannot be loaded, in one line; None for a usable model."""
        if self.defect is None:
            return None
        return f"{self.defect.what}: {self.defect.reason}" if self.defect.what else self.defect.reason

    def check(self) -> None:
        """Raises Unsupported or ModelLoadFailed for a model that cannot be loaded."""
        if self.defect is None:
            return
        if self.defect.what is not None:
            raise Unsupported(self.defect.what, self.defect.reason)
        raise ModelLoadFailed(self.name, self.defect.reason, self.defect.hint)


@dataclass(frozen=True, slots=True)
class _Found:
    name: str
    path: Path
    root: Root
    defect: Defect | None = None

    @property
    def rank(self) -> tuple[int, str, str]:
        """Of two ways to one folder the one with the smallest rank names it, whatever the order of the roots."""
        return self.name.count("/"), self.name, str(self.path)


class Catalog:
    """The models below some roots. Roots that do not exist are empty."""

    def __init__(self, roots: Sequence[Root], *, allow_remote_code: bool = False) -> None:
        self._roots = tuple(roots)
        self._allow_remote_code = allow_remote_code

    def scan(self) -> tuple[CatalogEntry, ...]:
        """Every model, broken ones with their reason, sorted by name."""
        return tuple(self._entry(name, found) for name, found in self._named())

    def resolve(self, name: str) -> CatalogEntry:
        """The model of that name, of that unambiguous short name (the last part of a name), or at that path.

        A broken model is resolved too: `CatalogEntry.check` raises its reason. Raises ModelNotFound.
        """
        named = self._named()
        exact = [each for each in named if each[0] == name]
        matches = exact or [each for each in named if name in _short_names(each[0])]
        if len(matches) == 1:
            return self._entry(*matches[0])
        if matches:
            names = [each[0] for each in matches]
            raise ModelNotFound(
                name, names, f"{name!r} is ambiguous: it may be {' or '.join(names)}; give one of these"
            )
        if name.startswith(("/", "~", ".")):
            return self._at(name, named)
        raise ModelNotFound(name, _similar(name, [each[0] for each in named]))

    def _at(self, name: str, named: Sequence[tuple[str, _Found]]) -> CatalogEntry:
        if name.startswith("."):
            raise ModelNotFound(name, reason=f"{name!r} is a relative path; give the model folder's absolute path")
        path = absolute_path(name)
        if path is None:
            raise ModelNotFound(name, reason=f"{name!r} is no path; give the model folder's absolute path")
        for known, found in named:
            if _identity(found.path) == _identity(path):
                return self._entry(known, found)
        try:
            usable = is_model_folder(path)
        except OSError as error:
            raise ModelNotFound(name, reason=f"{name!r} cannot be read: {error.strerror}") from None
        if not usable:
            raise ModelNotFound(name, reason=f"{name!r} is not a model folder: it has no config.json and no weights")
        return self._entry(str(path), _Found(str(path), path, Root(path.parent)))

    def _entry(self, name: str, found: _Found) -> CatalogEntry:
        if found.defect is not None:
            return CatalogEntry(name, found.path, "text", 0, defect=found.defect)
        findings = examine(found.path, allow_remote_code=self._allow_remote_code)
        return CatalogEntry(name, found.path, findings.kind, findings.size_bytes, findings.remote_code, findings.defect)

    def _named(self) -> list[tuple[str, _Found]]:
        folders: dict[Path, _Found] = {}
        for root in self._roots:
            for found in _below(root):
                key = _identity(found.path)
                folders[key] = min(found, folders.get(key, found), key=lambda each: each.rank)
        groups: dict[str, list[_Found]] = defaultdict(list)
        for found in folders.values():
            groups[found.name].append(found)
        return sorted((pair for group in groups.values() for pair in _tell_apart(group)), key=lambda pair: pair[0])


def absolute_path(text: str) -> Path | None:
    """The path that a client means; None for what no file can be called, or a `~` of nobody."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        return None
    return None if "\0" in text else path


def _identity(path: Path) -> Path:
    return path.resolve()


def _tell_apart(group: Sequence[_Found]) -> Iterator[tuple[str, _Found]]:
    group = [found for found in group if found.defect is None] or group  # an unfinished download is no rival
    if len(group) == 1:
        yield group[0].name, group[0]
        return
    tags = [found.root.tag for found in group]
    for found in group:
        tag = found.root.tag
        if tags.count(tag) > 1:
            tag += "-" + hashlib.blake2b(bytes(found.path), digest_size=3).hexdigest()
        yield f"{found.name}@{tag}", found


def _short_names(name: str) -> set[str]:
    bare = name.split("@", 1)[0]
    return {name.rsplit("/", 1)[-1], bare, bare.rsplit("/", 1)[-1]}


def _similar(name: str, names: Sequence[str]) -> list[str]:
    """Up to three names that look like what was asked for, by their last part or as a whole, in any case."""
    by_key = {key.lower(): full for full in names for key in (full.rsplit("/", 1)[-1], full)}
    keys = difflib.get_close_matches(name.lower(), by_key, n=6, cutoff=0.55)
    return list(dict.fromkeys(by_key[key] for key in keys))[:3]


def _below(root: Root) -> Iterator[_Found]:
    if _is_model(root.path):
        yield _Found(root.path.name, root.path, root)
        return
    for child in _children(root.path):
        if child.name.startswith(_HUB_PREFIX):
            yield _hub_model(child, root)
        elif _is_model(child):
            yield _Found(child.name, child, root)
        else:
            yield from (_Found(f"{child.name}/{each.name}", each, root) for each in _children(child) if _is_model(each))


def _children(path: Path) -> list[Path]:
    # Hidden ones are unfinished pulls, macOS "._" files and the hub's own notes.
    try:
        return sorted(each for each in path.iterdir() if not each.name.startswith(".") and each.is_dir())
    except OSError:
        return []


def _is_model(path: Path) -> bool:
    try:
        return is_model_folder(path)
    except OSError:
        return False


def _hub_model(repo: Path, root: Root) -> _Found:
    """The Hugging Face cache keeps revisions; refs/main says which is current, else the newest one is."""
    name = repo.name.removeprefix(_HUB_PREFIX).replace("--", "/")
    snapshots = _children(repo / "snapshots")
    try:
        current = (repo / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        current = ""
    for snapshot in snapshots:
        if snapshot.name == current:
            return _Found(name, snapshot, root)
    if snapshots:
        return _Found(name, max(snapshots, key=lambda each: each.stat().st_mtime_ns), root)
    hint = f"finish it with `omlxctl pull {name}`"
    return _Found(name, repo, root, Defect("its download was not finished: it has no snapshot", hint))
