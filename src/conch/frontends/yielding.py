"""Long enumerations for clients, in slices of time: the statistics of a thousand models, the metrics page.

All front ends share one ``YieldingLister``, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from time import monotonic
from typing import Final, TypeVar

T = TypeVar("T")

#: How long an enumeration may go on in one turn of the event loop (s).
SLICE: Final = 0.005


class YieldingLister:
    """Serves one client after another, so that a thousand of them take no more of a turn than one."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._working = asyncio.Lock()

    async def all(self, items: Iterable[T]) -> list[T]:
        """Everything that ``items`` has; what it is made of may change while it is gone through."""
        async with self._lock:
            found: list[T] = []
            end = monotonic() + SLICE
            for item in items:
                found.append(item)
                if monotonic() >= end:
                    await asyncio.sleep(0)
                    end = monotonic() + SLICE
            return found

    async def one(self, work: Awaitable[T]) -> T:
        """The result of ``work``, of which no more is done at a time; no enumeration waits for it.

        It may wait for something else than the event loop, such as a file system that hangs.
        """
        async with self._working:
            return await work
