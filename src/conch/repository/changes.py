"""The models that were added, removed or modified between two polls of a repository."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from conch.repository.fingerprint import ExternalFiles, Fingerprint, Stamp, take_external
from conch.repository.scan import ModelRepository

LOG = logging.getLogger("conch")


@dataclass(frozen=True)
class Changes:
    """Model names, in order."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    modified: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.modified)


@dataclass
class Watch:
    """Compares a repository with its state at the previous poll. The first poll reports every model as added.

    If the repository cannot be read, the poll reports no changes and logs one warning.
    """

    repository: ModelRepository
    _seen: dict[str, Fingerprint | None] = field(default_factory=dict)
    _changed: Mapping[str, Mapping[Path, frozenset[Stamp]]] = field(default_factory=dict)
    _problem: str = ""

    def poll(self, external: Mapping[str, ExternalFiles] = MappingProxyType({})) -> Changes:
        """Return the changes since the last call.

        A model is also modified if it becomes ambiguous or unique again, or if its external files have changed since
        they were loaded; ``external`` maps models to those files. Each change is reported once.
        """
        try:
            now = self.repository.fingerprints()
        except OSError as error:
            if str(error) != self._problem:
                LOG.warning("the model repository cannot be read: %s; models continue to serve", error)
            self._problem = str(error)
            return Changes()
        self._problem = ""
        before, self._seen = self._seen, now
        reported, self._changed = self._changed, _changed(external)
        return Changes(
            added=tuple(name for name in now if name not in before),
            removed=tuple(name for name in before if name not in now),
            modified=tuple(
                name
                for name in now
                if name in before
                and (now[name] != before[name] or self._changed.get(name) not in (None, reported.get(name)))
            ),
        )


def _changed(external: Mapping[str, ExternalFiles]) -> dict[str, dict[Path, frozenset[Stamp]]]:
    """Return the external files that have changed, with their current stamps, by model."""
    now = take_external({path for files in external.values() for path in files})
    changed = {
        name: {path: now[path] for path, stamps in files.items() if now[path] != stamps}
        for name, files in external.items()
    }
    return {name: files for name, files in changed.items() if files}
