"""Applies a candidate's configurations to the user's model repository, and keeps the previous files.

No other part of the analysis writes to the repository.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conch.config.editing import edit
from conch.core.errors import ConchError, invalid
from conch.machine.temporary import TemporaryFolder
from conch.measure.analyze.servers import LocalServer, Overrides, config_text
from conch.repository.scan import ModelRepository

#: Suffix of the previous configuration's file name.
BEFORE: Final = ".before-analyze"


@dataclass(frozen=True, slots=True)
class Change:
    """The configuration file of a model, and its text before (empty: none) and after the change."""

    model: str
    file: Path
    before: str
    after: str

    @property
    def diff(self) -> str:
        """The change in the format of ``diff -u``; empty if there is none."""
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True), self.after.splitlines(keepends=True),
            str(self.file) if self.before else "/dev/null", str(self.file),
        )  # fmt: skip
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def changes(repository: ModelRepository, overrides: Overrides) -> list[Change]:
    """Return the changes of files that ``overrides`` require; none if the repository already has them."""
    changed = []
    for model, values in overrides.items():
        before, file = config_text(repository, model)
        after = edit(before, values, str(file))
        if after != before:
            changed.append(Change(model, file, before, after))
    return changed


def apply(repository: ModelRepository, changed: Sequence[Change]) -> list[Path]:
    """Write the files, keep the previous ones beside them, and check that the models load.

    Returns the paths of the previous files. Raises INVALID_ARG for a file that has changed since the analysis, and the
    errors of loading; the files are then restored.
    """
    kept: dict[Path, Path | None] = {}
    try:
        for change in changed:
            text = change.file.read_text(encoding="utf-8") if change.file.exists() else ""
            if text != change.before:
                raise invalid(f"{change.file} has changed since the analysis: run it again")
            kept[change.file] = _keep(change.file) if change.before else None
            _write(change.file, change.after)
        _load(repository, [change.model for change in changed])
    except BaseException:
        for change in changed:
            old = kept.get(change.file)
            if old is not None:
                _write(change.file, change.before)
                old.unlink()
            elif change.file in kept:
                change.file.unlink(missing_ok=True)
        raise
    return [old for old in kept.values() if old is not None]


def _keep(file: Path) -> Path:
    """Copy a file and its permissions to an unused name."""
    number = 1
    while True:
        old = file.with_name(file.name + BEFORE + (f"-{number}" if number > 1 else ""))
        try:
            _create(old, file.read_text(encoding="utf-8"), file.stat())
            return old
        except FileExistsError:
            number += 1


def _write(file: Path, text: str) -> None:
    """Write a file atomically, because a server may be reading it; a symbolic link is followed.

    Keeps the permissions, and the owner if permitted.
    """
    file = file.resolve()
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    _create(new, text, file.stat() if file.exists() else None)
    new.replace(file)


def _create(file: Path, text: str, like: os.stat_result | None) -> None:
    """Create a file with the permissions of another. Raises FileExistsError if it exists."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if like is None else 0o600)
    with open(descriptor, "w", encoding="utf-8") as out:
        if like is not None:
            with suppress(OSError):
                os.fchown(descriptor, like.st_uid, like.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(like.st_mode))
        out.write(text)


def _load(repository: ModelRepository, models: Sequence[str]) -> None:
    with TemporaryFolder() as folder:
        try:
            with LocalServer(repository, models, folder / "server.log") as server:
                server.load({})
        except ConchError as error:
            raise ConchError(f"nothing is applied: {error.message}", error.code) from error
