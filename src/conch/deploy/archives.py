"""Archives of a repository: the same files give the same bytes, whoever packs them and when.

Names are sorted, times and owners fixed; files are streamed, however large they are.
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

from conch.deploy.contents import Contents, Entry
from conch.errors import invalid

#: The earliest time that a zip archive can have.
_ZIP_TIME: Final = (1980, 1, 1, 0, 0, 0)
_COPIED_AT_ONCE: Final = 1 << 20


def write_zip(path: Path, contents: Contents, below: str) -> None:
    """Write a zip archive with the repository in its folder ``below``.

    Nothing is compressed: weights hardly get smaller, and it would take most of the time.  Raises INVALID_ARG for a
    file that cannot be read or whose size changed meanwhile, OSError for what cannot be written.
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
    """Write a gzipped tar archive with the repository's files at its root, none of them compressed.

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
    """Copy the repository's files into ``folder``.  A store has no empty folders, so each of those gets a file."""
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
    """The permissions that every entry has: all may read, and execute what its owner may execute."""
    return 0o755 if entry.source is None or entry.executable else 0o644


def _zip_info(name: str, entry: Entry) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _ZIP_TIME)
    info.create_system = 3  # Unix, whose permissions follow
    kind = stat.S_IFDIR if entry.source is None else stat.S_IFREG
    info.external_attr = (kind | mode_of(entry)) << 16
    info.file_size = entry.size
    return info


def _opened(entry: Entry, source: Path) -> BinaryIO:
    """A file of the repository, or what stands for it, to be read.  Raises INVALID_ARG where it cannot be."""
    if entry.text is not None:
        return BytesIO(entry.text)
    try:
        return source.open("rb")
    except OSError as error:
        raise invalid(f"{source} cannot be read: {error.strerror}") from None


def _copy(source: BinaryIO, target: IO[bytes]) -> int:
    """Copy what is left of ``source``; returns its size."""
    copyfileobj(source, target, _COPIED_AT_ONCE)
    return source.tell()


def _check_size(entry: Entry, found: int) -> None:
    if found != entry.size:
        raise invalid(f"{entry.source} changed while it was packed: try again when nobody writes to the repository")
