"""Model directories that appear whole or not at all: written under a hidden name, then renamed.

conch and NVIDIA's server skip names that begin with a dot.  A conversion that was killed leaves its hidden folder; the
next one removes it, as nobody holds its lock any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from conch.errors import Code, ConchError, invalid

_WORK: Final = ".conch-convert-"
#: In a workspace: where models that are being replaced wait.
_REPLACED: Final = "replaced"


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
    """Remove what killed conversions left, and put back a model that one of them had moved out of the way."""
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
    """Move the folders ``names`` from ``made``, inside the workspace ``work``, into ``repository``, each whole.

    What they replace is moved into the workspace first, and comes back should this process die in between.
    """
    require_free(repository, names, overwrite)
    aside = work / _REPLACED
    aside.mkdir(exist_ok=True)
    for name in names:
        _flush(made / name)
        if (repository / name).exists():
            (repository / name).rename(aside / name)
        (made / name).rename(repository / name)


def _remove(folder: Path, repository: Path) -> None:
    for model in folder.glob(f"{_REPLACED}/*"):
        if not (repository / model.name).exists():
            model.rename(repository / model.name)
    shutil.rmtree(folder, ignore_errors=True)


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
