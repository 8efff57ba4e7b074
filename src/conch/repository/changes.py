"""The models that were added, removed or modified between two polls of a repository."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from conch.repository.fingerprint import Fingerprint
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
    """Remembers the last look.  The first look reports every model as added.

    What cannot be read is as it was, and one line in the log.
    """

    repository: ModelRepository
    _seen: dict[str, Fingerprint | None] = field(default_factory=dict)
    _problem: str = ""

    def look(self) -> Changes:
        """What is different since the last call.  A model that became ambiguous, or unambiguous again, is modified."""
        try:
            now = self.repository.fingerprints()
        except OSError as error:
            if str(error) != self._problem:
                LOG.warning("the model repository cannot be read: %s; models go on serving", error)
            self._problem = str(error)
            return Changes()
        self._problem = ""
        before, self._seen = self._seen, now
        return Changes(
            added=tuple(name for name in now if name not in before),
            removed=tuple(name for name in before if name not in now),
            modified=tuple(name for name in now if name in before and now[name] != before[name]),
        )
