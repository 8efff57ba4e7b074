"""Lists version directories, and selects the versions of a version policy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conch.config.schema import ModelConfig
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


#: Directories of a model that are not versions.
RESERVED = frozenset({"configs", "initial_state", "warmup", "__pycache__"})
MAX_VERSION = 2**63 - 1


@dataclass(frozen=True)
class Versions:
    """The versions found, ascending, and a warning for each directory with an invalid name."""

    found: tuple[int, ...]
    warnings: tuple[str, ...]


def read_versions(directories: Iterable[str]) -> Versions:
    """Return the versions among the sub-directories of a model."""
    numbers: list[int] = []
    warnings: list[str] = []
    for name in sorted(directories):
        if name in RESERVED or name.startswith("."):
            continue
        if not (name.isascii() and name.isdigit()) or int(name) > MAX_VERSION:
            warnings.append(f"ignore version directory '{name}' which fails to convert to integral number")
        elif len(name) > 1 and name.startswith("0"):
            warnings.append(f"ignore version directory '{name}' which contains leading zeros in its directory name")
        else:
            numbers.append(int(name))
    return Versions(tuple(sorted(numbers)), tuple(warnings))


@dataclass(frozen=True)
class Selection:
    """The versions to load, ascending, and those that the policy names but that do not exist."""

    versions: tuple[int, ...]
    missing: tuple[int, ...] = ()


def select_versions(config: ModelConfig, available: Sequence[int]) -> Selection:
    """Return the versions that the version policy of ``config`` selects; without a policy, the latest version."""
    ascending = sorted(available)
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return Selection(tuple(ascending))
        case "specific":
            selected = set(policy.specific.versions)
            return Selection(
                tuple(version for version in ascending if version in selected),
                tuple(sorted(selected.difference(ascending))),
            )
        case "latest":
            count = policy.latest.num_versions
            return Selection(tuple(ascending[-count:]) if count else ())
        case _:
            return Selection(tuple(ascending[-1:]))


def missing_version_warning(name: str, version: int) -> str:
    """Return the log line for a version that the policy names but that does not exist."""
    return f"version {version} is specified for model '{name}', but the version directory is not present"
