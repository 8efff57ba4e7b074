"""The event stream of the console: the overview, at every tick, to all pages that are open.

A page first gets the events ``server``, ``history`` and ``models``, then ``tick`` with the totals and the rows that
have changed. Sampling goes on without pages, because the server keeps the last hour. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic, time
from typing import Any, Final

import orjson

from conch import __version__
from conch.core.errors import unavailable
from conch.frontends.api_keys import ApiKeys
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.responders import EVENTS
from conch.frontends.loop_budget import YieldingLister
from conch.machine.memory import FreeMemory
from conch.options.settings import SERVER_VERSION
from conch.server.core import InferenceServer
from conch.server.overview import TOTALS, Row

LOG = logging.getLogger("conch")

#: The interval of events (s), and that of listings of the repository while a page is open.
TICK_SECONDS: Final = 2.0
LISTING_SECONDS: Final = 30.0
#: Maximum number of pages, and of bytes that a page may leave unread before its connection is closed.
MOST_PAGES: Final = 64
UNREAD_LIMIT: Final = 8 << 20


class OverviewStream:
    """Samples the overview of ``server`` from :meth:`start` to :meth:`close`, and sends it to pages.

    The stream of a page ends when its key is no longer one of the ``keys``, if there are any.
    """

    def __init__(self, server: InferenceServer, lister: YieldingLister, keys: ApiKeys) -> None:
        self._server = server
        self._keys = keys
        self._overview = server.overview
        self._lister = lister
        self._pages: set[HttpExchange] = set()
        self._rows: dict[str, Row] = {}
        self._directories: Sequence[str] = ()
        self._listed_at = -LISTING_SECONDS
        self._started_at = time()
        self._task: asyncio.Task[None] | None = None
        self._listing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sample."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End the sampling and all streams."""
        for task in (self._task, self._listing):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        for page in list(self._pages):
            page.finish()
        self._pages.clear()

    def open(self, exchange: HttpExchange) -> None:
        """Handle ``GET /console/events``. Raises UNAVAILABLE if too many pages are open."""
        if len(self._pages) >= MOST_PAGES:
            raise unavailable(f"{MOST_PAGES} pages of the console are open, which is the maximum")
        exchange.start(200, [EVENTS, (b"Cache-Control", b"no-store"), (b"X-Accel-Buffering", b"no")])
        exchange.write(_event("server", self._about()))
        exchange.write(_event("history", self._overview.history.series(TOTALS)))
        exchange.write(_event("models", list(self._rows.values())))
        self._pages.add(exchange)
        exchange.on_disconnect = lambda: self._pages.discard(exchange)

    def _about(self) -> dict[str, Any]:
        settings = self._server.settings
        return {
            "id": settings.id,
            "conch": __version__,
            "triton": SERVER_VERSION,
            "started": self._started_at,
            "control": settings.model_control_mode,
            "repositories": len(settings.model_repository),
            "tick": TICK_SECONDS,
        }

    async def _run(self) -> None:
        while True:
            try:
                await self._tick()
            except Exception:
                LOG.exception("the overview of the console failed")
            await asyncio.sleep(TICK_SECONDS)

    async def _tick(self) -> None:
        now = monotonic()
        if self._pages:
            self._server.ledger.refresh()
            if now - self._listed_at >= LISTING_SECONDS and self._listing is None:
                self._listed_at = now
                self._listing = asyncio.get_running_loop().create_task(self._list())
        rows = await self._lister.all(self._overview.rows(now, self._directories))
        self._overview.finish(time(), rows, await self._free())
        before, self._rows = self._rows, {row["key"]: row for row in rows}
        if self._pages:
            self._send(before)

    def _send(self, before: dict[str, Row]) -> None:
        """Send the totals and the changes since ``before`` to all pages."""
        tick = {
            **self._overview.totals,
            "ready": self._server.ready,
            "stopping": self._server.exiting,
            "changed": [row for key, row in self._rows.items() if before.get(key) != row],
            "removed": [key for key in before if key not in self._rows],
        }
        event = _event("tick", tick)
        for page in list(self._pages):
            if page.unsent > UNREAD_LIMIT:
                page.abort()
            elif self._keys and not self._keys.name_in(page.headers):
                self._pages.discard(page)
                page.finish()
            else:
                page.write(event)

    async def _list(self) -> None:
        """List the repository, which may take long."""
        try:
            self._directories = await self._server.repository.listed()
        except Exception as error:  # of an object store, which has logged it
            LOG.warning("the console cannot list the model repository: %s", error)
        finally:
            self._listing = None

    async def _free(self) -> FreeMemory | None:
        try:
            return await self._server.ledger.free()
        except (OSError, ValueError, KeyError):
            return None


def _event(name: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
