"""Reproducible archives of a repository: the same files always give the same bytes.

Names are sorted, and times and owners are fixed. Files of any size are streamed.
"""

from __future__ import annotations

import gzip
import os
import stat
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path
from shutil import copyfileobj
from typing import IO, BinaryIO, Final

from conch.core.errors import invalid
from conch.deploy.requirements import Contents, Entry

#: The earliest time in a zip archive.
_ZIP_TIME: Final = (1980, 1, 1, 0, 0, 0)
_COPIED_AT_ONCE: Final = 1 << 20


def write_zip(path: Path, contents: Contents, below: str) -> None:
    """Write a zip archive with the repository in its folder ``below``.

    Nothing is compressed: weights hardly shrink, and compression would take most of the time. Raises INVALID_ARG for
    an unreadable file or one whose size has changed, OSError if writing fails.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for entry in contents.entries:
            name = f"{below}/{entry.name}"
            if entry.source is None:
                archive.writestr(_zip_info(f"{name}/", entry), b"")
                continue
            with _opened(entry, entry.source) as source, archive.open(_zip_info(name, entry), "w") as target:
                copied = _copy(source, target)
            _check_size(entry, copied)


def write_tar_gz(path: Path, contents: Contents) -> None:
    """Write an uncompressed gzipped tar archive with the repository's files at its root.

    Raises as :func:`write_zip` does.
    """
    with (
        path.open("wb") as file,
        gzip.GzipFile("", "wb", 0, file, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for entry in contents.entries:
            info = tarfile.TarInfo(entry.name)
            info.mode = mode_of(entry)
            if entry.source is None:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
                continue
            info.size = entry.size
            with _opened(entry, entry.source) as source:
                _check_size(entry, source.seek(0, os.SEEK_END))
                source.seek(0)
                archive.addfile(info, source)


def copy(folder: Path, contents: Contents) -> None:
    """Copy the repository's files to ``folder``. Empty folders get a file, because stores have no empty folders."""
    for entry in contents.entries:
        target = folder / entry.name
        if entry.source is None:
            target.mkdir(parents=True, exist_ok=True)
            (target / ".keep").touch()
            (target / ".keep").chmod(0o644)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with _opened(entry, entry.source) as source, target.open("wb") as file:
            copied = _copy(source, file)
        _check_size(entry, copied)
        target.chmod(mode_of(entry))


def mode_of(entry: Entry) -> int:
    """Return the permissions of an entry in an archive: readable by all, and executable by all if by its owner."""
    return 0o755 if entry.source is None or entry.executable else 0o644


def _zip_info(name: str, entry: Entry) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _ZIP_TIME)
    info.create_system = 3  # Unix, so that permissions apply
    kind = stat.S_IFDIR if entry.source is None else stat.S_IFREG
    info.external_attr = (kind | mode_of(entry)) << 16
    info.file_size = entry.size
    return info


def _opened(entry: Entry, source: Path) -> BinaryIO:
    """Open an entry's file, or the text that replaces it. Raises INVALID_ARG if it cannot be read."""
    if entry.text is not None:
        return BytesIO(entry.text)
    try:
        return source.open("rb")
    except OSError as error:
        raise invalid(f"{source} cannot be read: {error.strerror}") from None


def _copy(source: BinaryIO, target: IO[bytes]) -> int:
    """Copy the rest of ``source``; returns its size."""
    copyfileobj(source, target, _COPIED_AT_ONCE)
    return source.tell()


def _check_size(entry: Entry, size: int) -> None:
    if size != entry.size:
        raise invalid(f"{entry.source} changed while it was packed: try again when the repository is not being written")
