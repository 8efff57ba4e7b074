"""Publishes model directories atomically: written under a hidden name, then renamed.

conch and NVIDIA's server skip names that begin with a dot. A killed conversion leaves its hidden folder; the next
conversion removes it, because no process holds its lock.
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

from conch.checkpoints.manifest import FILENAME, Manifest
from conch.core.errors import Code, ConchError, invalid

_WORK: Final = ".conch-convert-"
#: In a workspace: the models that are being replaced.
_REPLACED: Final = "replaced"
#: In a workspace: the record of folders being published, and folders that were taken back.
_RECORD: Final = "publishing.json"
_UNPUBLISHED: Final = "unpublished"


@contextmanager
def workspace(repository: Path) -> Iterator[Path]:
    """Yield a hidden folder in ``repository``, which is created if necessary; removes leftovers of killed conversions.

    The folder is removed at the end. Raises INVALID_ARG if the repository is not writable.
    """
    try:
        repository.mkdir(parents=True, exist_ok=True)
        # A folder without a lock must not be mistaken for a leftover.
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
    """Raise ALREADY_EXISTS for the first existing model, unless it may be replaced."""
    for name in names:
        if not overwrite and (repository / name).exists():
            raise ConchError(
                f"{repository / name} already exists: choose another --name, or replace it with --overwrite",
                Code.ALREADY_EXISTS,
            )


def publish(built: Path, work: Path, repository: Path, names: Sequence[str], overwrite: bool) -> None:
    """Move the folders ``names`` from ``built``, inside the workspace ``work``, to ``repository``: all or none.

    Replaced folders are first moved to the workspace, and removed with it once all new folders are in place. If a move
    fails, or this process dies in between, :func:`workspace` or its next call restores everything.

    Raises INVALID_ARG, naming the folder, if one cannot be moved.
    """
    require_free(repository, names, overwrite)
    aside = work / _REPLACED
    aside.mkdir(exist_ok=True)
    for name in names:
        _flush(built / name)
    _write_record(work, {name: _identity(built / name) for name in names})
    for name in names:
        try:
            if os.path.lexists(repository / name):
                (repository / name).rename(aside / name)
            (built / name).rename(repository / name)
        except OSError as error:
            raise invalid(f"{repository / name} cannot be written: {error.strerror}; nothing was replaced") from None
    (work / _RECORD).unlink()


def _remove(folder: Path, repository: Path) -> None:
    """Remove a workspace.

    If only some of its folders were published, takes these back and restores the replaced ones. A folder that cannot
    be restored stays in the workspace.
    """
    unpublished, published = folder / _UNPUBLISHED, _read_record(folder)
    for name, identity in published.items():
        with suppress(OSError):
            if _identity(repository / name) == identity:
                unpublished.mkdir(exist_ok=True)
                (repository / name).rename(unpublished / name)
    kept = False
    for model in folder.glob(f"{_REPLACED}/*"):
        back = repository / model.name
        if os.path.lexists(back):  # the new folder, or one that another process has created
            kept |= bool(published)
            continue
        try:
            model.rename(back)
        except OSError:
            kept = True
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)


def _identity(folder: Path) -> list[int]:
    """Return a value that identifies a folder across moves, and differs for a later folder at the same path."""
    status = folder.lstat()
    return [status.st_dev, status.st_ino, status.st_mtime_ns]


def _write_record(work: Path, folders: Mapping[str, list[int]]) -> None:
    with (work / _RECORD).open("w", encoding="utf-8") as file:
        json.dump(folders, file)
        file.flush()
        os.fsync(file.fileno())


def _read_record(work: Path) -> dict[str, list[int]]:
    """Return the folders to be published together; empty if all were, or none."""
    try:
        record: dict[str, list[int]] = json.loads((work / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # an incomplete record was written before any folder was moved
        return {}
    return record


def _flush(folder: Path) -> None:
    """Flush the content to disk before the folder is renamed, in case the machine crashes."""
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


def written_manifest(folder: Path) -> Manifest:
    """Return the manifest in ``folder``, or in its version with the highest number; other files may be missing.

    Raises INVALID_ARG if there is none, or if it cannot be read.
    """
    versions = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
    for directory in (folder, *sorted(versions, key=lambda version: -int(version.name))):
        manifest = Manifest.read(directory)
        if manifest is not None:
            return manifest
    raise invalid(f"{folder} is not a converted model: neither it nor a version in it has a {FILENAME}")
