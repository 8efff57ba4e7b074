"""The models that were added, removed or modified between two polls of a repository."""

from __future__ import annotations

from dataclasses import dataclass, field

from conch.repository.errors import PollError
from conch.repository.fingerprint import Fingerprint
from conch.repository.scan import ModelRepository


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
    """Remembers the last look.  The first look reports every model as added."""

    repository: ModelRepository
    _seen: dict[str, Fingerprint | None] = field(default_factory=dict)

    def look(self) -> Changes:
        """What is different since the last call.  A model that became ambiguous, or unambiguous again, is modified."""
        now = {name: self._fingerprint(name) for name in self.repository.names()}
        before, self._seen = self._seen, now
        return Changes(
            added=tuple(name for name in now if name not in before),
            removed=tuple(name for name in before if name not in now),
            modified=tuple(name for name in now if name in before and now[name] != before[name]),
        )

    def _fingerprint(self, name: str) -> Fingerprint | None:
        try:
            return self.repository.fingerprint(name)
        except (PollError, OSError):
            return None
