"""The locations that make up a repository: directories, and repositories in object stores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from conch.config.schema import ModelConfig
from conch.core.errors import invalid
from conch.repository.directory_kinds import repository_problem
from conch.repository.fingerprint import Fingerprint, take_fingerprint
from conch.repository.model_files import Located
from conch.repository.names import is_directory_name, is_utf8
from conch.repository.stores.root import StoreRoot
from conch.repository.stores.store import MOUNTS
from conch.repository.stores.urls import StoreUrl, is_url, parse_url
from conch.repository.versions import directories_in, is_directory

#: A repository location: a path or a URL.
RepositoryLocation = Path | StoreUrl


class Root(Protocol):
    """One repository location. Its methods block; all except :meth:`known`, :meth:`shown` and :meth:`close` do I/O."""

    def names(self) -> list[str]:
        """Return the names of the models."""

    def known(self) -> list[str]:
        """Return the names of the models, from the last listing if that avoids I/O."""

    def has(self, name: str) -> bool:
        """Return whether the location has a model of that name."""

    def fingerprint(self, name: str, config_name: str | None) -> Fingerprint:
        """Return a value that changes with the files of a model."""

    def fingerprints(self, config_name: str | None) -> Mapping[str, Fingerprint | None]:
        """Return the fingerprints of all models; None for an unreadable one."""

    def locate(self, name: str, config_name: str | None, override: ModelConfig | None) -> Located:
        """Provide a directory with the model's files, or at least the files that its configuration needs."""

    def shown(self, text: str) -> str:
        """Replace the local paths of copies in ``text`` with the repository locations."""

    def close(self) -> None:
        """Abort reads in progress."""


class DirectoryRoot:
    """A local directory. Raises INVALID_ARG if it is not a repository."""

    def __init__(self, path: Path) -> None:
        problem = repository_problem(path)
        if problem is not None:
            raise invalid(f"{problem.message} ({problem.hint})")
        self.path = path.resolve()

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        return [name for name in directories_in(self.path) if is_utf8(name)]

    known = names

    def unnameable(self) -> list[Path]:
        """Return the directories with names that are not valid UTF-8."""
        return [self.path / name for name in directories_in(self.path) if not is_utf8(name)]

    def has(self, name: str) -> bool:
        return is_directory_name(name) and is_directory(self.path / name)

    def fingerprint(self, name: str, config_name: str | None) -> Fingerprint:
        return take_fingerprint(self.path / name, config_name)

    def fingerprints(self, config_name: str | None) -> Mapping[str, Fingerprint | None]:
        return {name: self._fingerprint(name, config_name) for name in self.names()}

    def _fingerprint(self, name: str, config_name: str | None) -> Fingerprint | None:
        try:
            return self.fingerprint(name, config_name)
        except OSError:
            return None

    def locate(self, name: str, config_name: str | None, override: ModelConfig | None) -> Located:
        return Located(self.path / name)

    def shown(self, text: str) -> str:
        return text

    def close(self) -> None:
        pass


def parse_location(text: str | os.PathLike[str]) -> RepositoryLocation:
    """Parse a repository location. Raises INVALID_ARG for an unsupported URL."""
    text = os.fspath(text)
    return parse_url(text) if is_url(text) else Path(text)


def root_of(
    location: RepositoryLocation, cache: str, *, whole: bool = False, environment: Mapping[str, str] = os.environ
) -> Root:
    """Open a repository location; ``cache`` is the directory for copies, empty for the default.

    With ``whole``, copies contain all versions of a model.
    """
    if isinstance(location, Path):
        return DirectoryRoot(location)
    return StoreRoot(location, cache_directory(location, cache, environment), whole=whole)


def cache_directory(url: StoreUrl, chosen: str, environment: Mapping[str, str]) -> Path:
    """Return the directory for copies: ``chosen``, else the value of Triton's variable, else the user's cache."""
    mount = environment.get(MOUNTS.get(url.scheme, ""), "")
    if chosen or mount:
        return Path(chosen or mount).expanduser().absolute()
    home = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "conch" / "repositories"
