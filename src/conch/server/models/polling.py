"""Polls a model repository: loads new and modified models, unloads removed models.

A failed download is retried at the next poll, then after twice as many polls each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from conch.core.errors import ConchError
from conch.repository.changes import Watch
from conch.repository.errors import PollError
from conch.repository.scan import ModelRepository
from conch.server.models.lifecycle import Lifecycle

LOG = logging.getLogger("conch")

#: The longest time between retries of a model (polls).
_MOST_LOOKS: Final = 32


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
        """Record the current state of the repository as known."""
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
            LOG.info("did not load what has changed in the model repository: %s", error.message)
        except Exception:
            LOG.exception("failed to load what has changed in the model repository")

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
                self._pauses[name] = self._left[name] = min(2 * self._pauses.get(name, 0) or 1, _MOST_LOOKS)
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
        self._left = {name: looks - 1 for name, looks in self._left.items()}
        names = [name for name, looks in self._left.items() if looks <= 0]
        for name in names:
            del self._left[name]
        return names
