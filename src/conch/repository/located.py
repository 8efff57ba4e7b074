"""The location of a model's files: a directory with all files, or only with the needed ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from conch.repository.fingerprint import Fingerprint


@dataclass(frozen=True)
class Inventory:
    """The complete contents of a model in its repository; its local directory may hold fewer files.

    ``directories`` are all of its directories; ``artefacts`` are the names in the alphabetically first version.
    """

    directories: tuple[str, ...]
    artefacts: frozenset[str]
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Located:
    """The location of a model. If ``inventory`` is None, the directory is complete. ``copy`` keeps a copy in use."""

    directory: Path
    inventory: Inventory | None = None
    copy: object = None
