"""A model as a repository gives it: the directory where its files are, all of them or those that are needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from conch.repository.fingerprint import Fingerprint


@dataclass(frozen=True)
class Inventory:
    """What the repository has of a model, of which its directory here may have less.

    ``directories`` are all of its directories; ``artefacts`` are the names in the alphabetically first version.
    """

    directories: tuple[str, ...]
    artefacts: frozenset[str]
    fingerprint: Fingerprint


@dataclass(frozen=True)
class Located:
    """Where a model is.  ``inventory`` is None where its directory says what there is; ``copy`` keeps a copy."""

    directory: Path
    inventory: Inventory | None = None
    copy: object = None
