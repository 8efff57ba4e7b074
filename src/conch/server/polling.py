"""Follows a model repository whose files change: loads what is new or modified, unloads what is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from conch.repository.changes import Watch
from conch.repository.scan import ModelRepository
from conch.server.lifecycle import Lifecycle

LOG = logging.getLogger("conch")


class RepositoryPolling:
    """Looks every ``seconds`` for what has changed since the last look; runs on the event loop."""

    def __init__(self, repository: ModelRepository, lifecycle: Lifecycle, seconds: float) -> None:
        self._watch = Watch(repository)
        self._lifecycle = lifecycle
        self._seconds = seconds
        self._polling: asyncio.Task[None] | None = None
        self._loading: set[asyncio.Task[None]] = set()

    async def look(self) -> None:
        """Take what is there now for what is known."""
        await asyncio.to_thread(self._watch.look)

    def start(self) -> None:
        """Follow changes from now on."""
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    def stop(self) -> None:
        """Follow no more changes; loads that are under way end with the lifecycle's."""
        if self._polling is not None:
            self._polling.cancel()

    async def _load(self, names: Iterable[str]) -> None:
        """Load models while the repository is polled on, since one may take long or hang."""
        try:
            await self._lifecycle.load_all(list(names))
        except Exception:
            LOG.exception("failed to load what has changed in the model repository")

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            try:
                changes = await asyncio.to_thread(self._watch.look)
                for name in changes.removed:
                    await self._lifecycle.unload(name)
                loading = asyncio.get_running_loop().create_task(self._load([*changes.added, *changes.modified]))
                self._loading.add(loading)
                loading.add_done_callback(self._loading.discard)
            except Exception:
                LOG.exception("failed to poll the model repository")
