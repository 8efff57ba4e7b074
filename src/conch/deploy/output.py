"""The folder that a command writes: whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from conch.errors import Code, ConchError, invalid


def check_output(out: Path, repository: Path) -> None:
    """Raise ALREADY_EXISTS where ``out`` has something in it, INVALID_ARG where it cannot be made."""
    if out.resolve().is_relative_to(repository.resolve()):
        raise invalid(f"{out} lies in the model repository, which would then have it as a model: name another folder")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            what = "and is not empty" if out.is_dir() else "and is no folder"
            raise ConchError(f"{out} is there already {what}: name another folder", Code.ALREADY_EXISTS)
    except OSError as error:
        raise invalid(f"{out} cannot be written: {error.strerror}") from None
    if not out.absolute().parent.is_dir():
        raise invalid(f"{out} cannot be written: there is no folder {out.absolute().parent}")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A new folder beside ``out``, which becomes ``out`` at the end; it is removed if anything is raised within.

    Raises INVALID_ARG for what cannot be written.
    """
    try:
        folder = Path(mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
        try:
            yield folder
            folder.chmod(0o755)
            os.rename(folder, out.absolute())
        except BaseException:
            rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise invalid(f"{error.filename or out} cannot be written: {error.strerror or error}") from None
