"""The files of a repository that go into an artifact, without files that belong to no model.

Called before anything is written; reads directories, not files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from conch.core.errors import ConchError, invalid

#: Names of files and folders that belong to no model.
_LEFT_OUT: Final = (".*", "__pycache__", "*.pyc", "*~", "*.tmp", "*.swp", "*.partial")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the repository: ``name`` is relative to its root with ``/`` as separator, ``size`` is in bytes.

    ``source`` is None for an empty directory, such as an ensemble's version.  ``text`` replaces the content of the file
    in the artifact.
    """

    name: str
    source: Path | None
    size: int = 0
    executable: bool = False
    text: bytes | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """The entries, sorted by name, and the names of files that are left out."""

    entries: tuple[Entry, ...]
    left_out: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The size of all files (bytes)."""
        return sum(entry.size for entry in self.entries)


def contents(root: Path) -> Contents:
    """List the contents of ``root``.

    A link to a file or a folder of the repository counts as a copy of it.  Raises INVALID_ARG for a link out of the
    repository, into itself or to nothing, for a name that is not UTF-8, and for unreadable files.
    """
    left_out: list[str] = []
    try:
        entries = sorted(_below(root, "", root.resolve(), (root.resolve(),), left_out), key=lambda entry: entry.name)
    except OSError as error:
        raise invalid(f"{error.filename or root} cannot be read: {error.strerror}") from None
    return Contents(tuple(entries), tuple(sorted(left_out)))


def _below(folder: Path, prefix: str, root: Path, above: tuple[Path, ...], left_out: list[str]) -> Iterator[Entry]:
    with os.scandir(folder) as listing:
        for item in listing:
            path, name = Path(item.path), f"{prefix}{item.name}"
            if any(fnmatch(item.name, pattern) for pattern in _LEFT_OUT):
                left_out.append(name)
                continue
            try:
                name.encode()
            except UnicodeEncodeError:
                raise invalid(f"{path} cannot be in an artifact, as its name is not UTF-8: rename it") from None
            if item.is_symlink():
                _check_link(path, root, above)
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                inner = list(_below(path, f"{name}/", root, (*above, path.resolve()), left_out))
                yield from inner or [Entry(name, None)]
            elif stat.S_ISREG(status.st_mode):
                if not os.access(path, os.R_OK):
                    raise invalid(f"{path} cannot be read: permission denied")
                yield Entry(name, path, status.st_size, bool(status.st_mode & stat.S_IXUSR))
            else:
                left_out.append(name)


def _check_link(link: Path, root: Path, above: tuple[Path, ...]) -> None:
    """Raise INVALID_ARG for a link with a target that cannot be packed in its place."""
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):
        raise _bad_link(link, "to nothing: remove it") from None
    if not target.is_relative_to(root):
        raise _bad_link(link, f"out of the repository, to {target}: put a copy in its place (cp -rL)")
    if target in above:
        raise _bad_link(link, f"to a folder that contains it, {target}: remove it")


def _bad_link(link: Path, where: str) -> ConchError:
    return invalid(f"{link} is a link that leads {where}")
