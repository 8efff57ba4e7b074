"""Polls a model repository: loads new and modified models, unloads removed models.

A failed download is retried at the next poll, then after twice as many polls each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from conch.core.errors import ConchError
from conch.repository.errors import PollError
from conch.repository.fingerprint import ExternalFiles, Fingerprint, Stamp, take_external
from conch.repository.scan import ModelRepository
from conch.server.models.lifecycle import Lifecycle

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


#: The longest time between retries of a model (polls).
_MOST_POLLS: Final = 32


class RepositoryPolling:
    """Polls the repository for changes every ``seconds``; runs on the event loop."""

    def __init__(self, repository: ModelRepository, lifecycle: Lifecycle, seconds: float) -> None:
        self._repository = repository
        self._watch = Watch(repository)
        self._lifecycle = lifecycle
        self._seconds = seconds
        self._polling: asyncio.Task[None] | None = None
        self._loading: set[asyncio.Task[None]] = set()
        self._retries = Retries()

    async def record_state(self) -> None:
        """Record the state of the repository; polls report later changes only."""
        await self._repository.in_thread(self._watch.poll)

    def start(self) -> None:
        """Start polling."""
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    def note(self, names: Iterable[str], failed: Mapping[str, ConchError]) -> None:
        """Record the result of a load of ``names``; ``failed`` has the errors by name."""
        self._retries.note(names, failed)

    def stop(self) -> None:
        """Stop polling; the lifecycle ends the loads in progress."""
        if self._polling is not None:
            self._polling.cancel()

    async def _load(self, names: Sequence[str]) -> None:
        """Load models in the background, because a load may take long or hang."""
        try:
            self.note(names, await self._lifecycle.load_all(names))
        except ConchError as error:  # raised only while the server stops; failed loads are in the result
            LOG.info("did not load the changes in the model repository: %s", error.message)
        except Exception:
            LOG.exception("failed to load the changes in the model repository")

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            try:
                poll = partial(self._watch.poll, self._lifecycle.external_files())
                changes = await self._repository.in_thread(poll)
                for name in changes.removed:
                    self._retries.forget(name)
                    await self._lifecycle.unload(name)
                names = list(dict.fromkeys([*changes.added, *changes.modified, *self._retries.due()]))
                if names:
                    loading = asyncio.get_running_loop().create_task(self._load(names))
                    self._loading.add(loading)
                    loading.add_done_callback(self._loading.discard)
            except Exception:
                LOG.exception("failed to poll the model repository")


class Retries:
    """Models to load again although their files have not changed.

    These are models with failed downloads. When one of them loads, models that failed in the same load are retried
    too, because they may depend on it.
    """

    def __init__(self) -> None:
        self._pauses: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._beside: set[str] = set()

    def note(self, names: Iterable[str], failed: Mapping[str, ConchError]) -> None:
        """Record the result of a load of ``names``; ``failed`` has the errors by name."""
        passing = {name for name, error in failed.items() if isinstance(error, PollError) and error.passing}
        self._beside -= set(names)
        for name in names:
            if name in passing:
                self._pauses[name] = self._left[name] = min(2 * self._pauses.get(name, 0) or 1, _MOST_POLLS)
            elif self.forget(name) and name not in failed:
                self._left |= dict.fromkeys(self._beside, 1)
                self._beside.clear()
        if passing:
            self._beside |= failed.keys() - passing

    def forget(self, name: str) -> bool:
        """Cancel the retries of a model; returns whether they were due to a failed download."""
        self._left.pop(name, None)
        self._beside.discard(name)
        return self._pauses.pop(name, None) is not None

    def due(self) -> list[str]:
        """The models to load now; called at each poll."""
        self._left = {name: polls - 1 for name, polls in self._left.items()}
        names = [name for name, polls in self._left.items() if polls <= 0]
        for name in names:
            del self._left[name]
        return names
