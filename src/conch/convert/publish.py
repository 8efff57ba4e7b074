"""Model directories that appear whole or not at all: written under a hidden name, then renamed.

conch and NVIDIA's server skip names that begin with a dot.  A conversion that was killed leaves its hidden folder; the
next one removes it, as nobody holds its lock any more.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from conch.errors import Code, ConchError, invalid

_WORK: Final = ".conch-convert-"
#: In a workspace: where models that are being replaced wait.
_REPLACED: Final = "replaced"
#: In a workspace: the folders that are being published, and those that were taken back.
_RECORD: Final = "publishing.json"
_UNPUBLISHED: Final = "unpublished"


@contextmanager
def workspace(repository: Path) -> Iterator[Path]:
    """A hidden folder in ``repository``, removed in the end.  The repository is made if need be, and rid of leftovers.

    Raises INVALID_ARG when the repository cannot be written to.
    """
    try:
        repository.mkdir(parents=True, exist_ok=True)
        # A folder that has no lock yet must not be taken for a leftover.
        with _locked(repository):
            recover(repository)
            folder = Path(tempfile.mkdtemp(prefix=_WORK, dir=repository))
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise invalid(f"repository {repository} cannot be written to: {error.strerror}") from None
    try:
        yield folder
    finally:
        _remove(folder, repository)
        os.close(lock)


def recover(repository: Path) -> None:
    """Remove the workspaces of killed conversions, and restore the models that they had moved aside."""
    for folder in repository.glob(f"{_WORK}*"):
        if folder.is_dir() and not _held(folder):
            _remove(folder, repository)


def require_free(repository: Path, names: Sequence[str], overwrite: bool) -> None:
    """Raise ALREADY_EXISTS for the first model that is there, unless it may be replaced."""
    for name in names:
        if not overwrite and (repository / name).exists():
            raise ConchError(
                f"{repository / name} is there already: choose another --name, or replace it with --overwrite",
                Code.ALREADY_EXISTS,
            )


def publish(made: Path, work: Path, repository: Path, names: Sequence[str], overwrite: bool) -> None:
    """Move the folders ``names`` from ``made``, inside the workspace ``work``, into ``repository``: all or none.

    The replaced folders are moved into the workspace first, and removed with it when all new folders are in place.  If
    a move fails, or this process dies in between, :func:`workspace` or the next run of it restores everything.

    Raises INVALID_ARG, naming the folder, if one cannot be moved.
    """
    require_free(repository, names, overwrite)
    aside = work / _REPLACED
    aside.mkdir(exist_ok=True)
    for name in names:
        _flush(made / name)
    _write_record(work, {name: _identity(made / name) for name in names})
    for name in names:
        try:
            if os.path.lexists(repository / name):
                (repository / name).rename(aside / name)
            (made / name).rename(repository / name)
        except OSError as error:
            raise invalid(f"{repository / name} cannot be written: {error.strerror}; nothing was replaced") from None
    (work / _RECORD).unlink()


def _remove(folder: Path, repository: Path) -> None:
    """Remove a workspace.  If only some of its folders were published, take these back and restore the replaced ones;
    a folder that cannot be restored stays in the workspace."""
    unpublished, published = folder / _UNPUBLISHED, _read_record(folder)
    for name, identity in published.items():
        with suppress(OSError):
            if _identity(repository / name) == identity:
                unpublished.mkdir(exist_ok=True)
                (repository / name).rename(unpublished / name)
    kept = False
    for model in folder.glob(f"{_REPLACED}/*"):
        back = repository / model.name
        if os.path.lexists(back):  # the new one, or one that somebody else has put there
            kept |= bool(published)
            continue
        try:
            model.rename(back)
        except OSError:
            kept = True
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)


def _identity(folder: Path) -> list[int]:
    """Identifies a folder across moves, and distinguishes it from a later one at the same path."""
    found = folder.lstat()
    return [found.st_dev, found.st_ino, found.st_mtime_ns]


def _write_record(work: Path, folders: Mapping[str, list[int]]) -> None:
    with (work / _RECORD).open("w", encoding="utf-8") as file:
        json.dump(folders, file)
        file.flush()
        os.fsync(file.fileno())


def _read_record(work: Path) -> dict[str, list[int]]:
    """The folders that were to be published together; empty if all were, or none."""
    try:
        found: dict[str, list[int]] = json.loads((work / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # one that is not whole was written before anything was moved
        return {}
    return found


def _flush(folder: Path) -> None:
    """Have the content reach the disk before the name does, in case the machine stops and not only this process."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _held(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
