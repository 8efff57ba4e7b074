"""Which names of objects may become files: a name in a store is any text, and must not lead out of the copy."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from conch.repository.names import is_utf8
from conch.repository.stores.store import RemoteFile

LOG = logging.getLogger("conch")

#: What file systems take, in bytes.
_LONGEST_NAME: Final = 255
_LONGEST_PATH: Final = 1024
#: How many names are warned of by themselves.
_NAMED: Final = 5


def usable(files: Iterable[RemoteFile]) -> tuple[list[RemoteFile], list[str]]:
    """The files whose names can be those of files below a directory, sorted, and one sentence on each other."""
    good: dict[str, RemoteFile] = {}
    refused: list[str] = []
    directories: set[str] = set()
    for file in sorted(files):
        problem = _problem(file.path)
        if problem:
            refused.append(f"{file.path!r:.200} {problem}")
            continue
        good[file.path] = file
        parts = file.path.rstrip("/").split("/")
        directories.update("/".join(parts[:count]) for count in range(1, len(parts)))
    both = [good.pop(path) for path in sorted(directories & good.keys())]
    # Some tools mark directories by empty objects of their names.
    refused += [f"{file.path!r:.200} is also the name of a directory" for file in both if file.size]
    return list(good.values()), refused


def warn(place: object, refused: Iterable[str], known: set[str]) -> None:
    """Log what is left out of a listing, each once: ``known`` are those that were logged before."""
    new = [one for one in refused if one not in known]
    known.update(new)
    for one in new[:_NAMED]:
        LOG.warning("model repository %s: %s, and is left out", place, one)
    if len(new) > _NAMED:
        LOG.warning("model repository %s: %d more names like this are left out", place, len(new) - _NAMED)


def _problem(path: str) -> str:
    """Why a name cannot be a file's; empty where it can."""
    parts = path.removesuffix("/").split("/")
    if not all(parts):
        return "has an empty name between slashes"
    if any(part in (".", "..") for part in parts):
        return "has a part that leads elsewhere"
    if "\\" in path or not path.isprintable() or not is_utf8(path):
        return "has a character that no file should have in its name"
    if len(path.encode()) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in parts):
        return "is too long for a file's name"
    return ""
