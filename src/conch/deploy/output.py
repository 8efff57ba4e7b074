"""The folder that a command writes: whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOTEMPTY
from pathlib import Path
from shutil import disk_usage, rmtree
from tempfile import mkdtemp

from conch.deploy.rendering import shown
from conch.errors import Code, ConchError, invalid


def check_output(out: Path, repository: Path) -> None:
    """Raise ALREADY_EXISTS where ``out`` has something in it, INVALID_ARG where it cannot be made."""
    if out.resolve().is_relative_to(repository.resolve()):
        raise invalid(f"{out} is in the model repository, which would take it for a model: name another folder")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            what = "exists and is not empty" if out.is_dir() else "exists and is not a folder"
            raise ConchError(f"{out} {what}: name another folder", Code.ALREADY_EXISTS)
        if out.is_symlink() and not out.exists():
            raise invalid(f"{out} is a link that leads to nothing: remove it")
    except OSError as error:
        raise invalid(f"{out} cannot be written: {error.strerror}") from None
    if not out.absolute().parent.is_dir():
        raise invalid(f"{out} cannot be written: there is no folder {out.absolute().parent}")


@contextmanager
def staged(out: Path, size: int = 0) -> Iterator[Path]:
    """A new folder whose content becomes that of ``out`` at the end; it is removed if anything is raised within.

    An ``out`` that is there stays the folder that it is: it may be a shell's current one, a link or a volume.  Raises
    INVALID_ARG for what cannot be written, and where there is no room for ``size`` bytes.
    """
    there = out.is_dir()
    try:
        folder = Path(mkdtemp(prefix=".conch-", dir=out if there else out.absolute().parent))
        try:
            _check_room(folder, size, out)
            yield folder
            for inner, _, _ in os.walk(folder):
                os.chmod(inner, 0o755)
            if there:
                _move_all(folder, out)
            else:
                os.rename(folder, out.absolute())
        except BaseException:
            rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise invalid(f"{out} cannot be written: {error.strerror or error}") from None


def _check_room(folder: Path, size: int, out: Path) -> None:
    free = disk_usage(folder).free
    if size > free:
        raise invalid(f"{out} cannot be written: it needs {shown(size)}, and the disk has {shown(free)} left")


def _move_all(folder: Path, out: Path) -> None:
    """Move what is in ``folder``, which is in ``out``, one up.  Raises OSError where ``out`` has anything else."""
    if any(path.name != folder.name for path in out.iterdir()):
        raise OSError(ENOTEMPTY, os.strerror(ENOTEMPTY))
    for path in list(folder.iterdir()):
        path.rename(out / path.name)
    folder.rmdir()
