"""Lists the directories in a directory; files and broken links are skipped."""

from __future__ import annotations

import os
from pathlib import Path

from conch.repository.names import is_hidden


def directories_in(directory: Path) -> list[str]:
    """Return the names of the directories in ``directory``, including links to directories, without hidden ones."""
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries if not is_hidden(entry.name) and is_directory(entry)]


def is_directory(path: Path | os.DirEntry[str]) -> bool:
    """Return whether ``path`` is a directory; False for circular links and for targets that cannot be accessed."""
    try:
        return path.is_dir()
    except OSError:
        return False
