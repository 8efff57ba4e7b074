"""Lists directories, whatever else lies beside them."""

from __future__ import annotations

import os
from pathlib import Path

from conch.repository.names import is_hidden


def directories_in(directory: Path) -> list[str]:
    """The names of the directories in ``directory``, links to some included, without hidden ones."""
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries if not is_hidden(entry.name) and is_directory(entry)]


def is_directory(path: Path | os.DirEntry[str]) -> bool:
    """Whether there is a directory; False for links that lead to themselves, or to where nobody may look."""
    try:
        return path.is_dir()
    except OSError:
        return False
