"""Runs long enumerations in time slices: the statistics of a thousand models, the metrics page.

All front ends share one ``YieldingLister``, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from time import monotonic
from typing import Final, TypeVar

T = TypeVar("T")

#: Maximum time of an enumeration in one iteration of the event loop (s).
SLICE: Final = 0.005


class YieldingLister:
    """Serves one client at a time, so that a thousand clients take no more of an iteration than one."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._working = asyncio.Lock()

    async def all(self, items: Iterable[T]) -> list[T]:
        """Return all ``items``; the underlying data may change during the enumeration."""
        async with self._lock:
            listed: list[T] = []
            end = monotonic() + SLICE
            for item in items:
                listed.append(item)
                if monotonic() >= end:
                    await asyncio.sleep(0)
                    end = monotonic() + SLICE
            return listed

    async def one(self, work: Awaitable[T]) -> T:
        """Return the result of ``work``; only one runs at a time, and enumerations do not wait for it.

        ``work`` may wait for something outside the event loop, such as a hung file system.
        """
        async with self._working:
            return await work
