"""Shares the event loop's time among connections, so that none of them blocks the others.

Code that handles client data calls :meth:`EventLoopBudget.over` after each piece. When it returns true, the rest is
scheduled with :meth:`EventLoopBudget.later`. All connections of a front end share one budget, on the event loop.
``YieldingLister`` runs long enumerations in time slices: the statistics of a thousand models, the metrics page.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from time import monotonic
from typing import Final, TypeVar

LOG = logging.getLogger("conch")

T = TypeVar("T")

#: Time for all connections together in one iteration of the event loop (s).
SHARE: Final = 0.005


class EventLoopBudget:
    """Counts the time of one iteration of the event loop from the first check in it; ``clock`` is in seconds."""

    __slots__ = ("_clock", "_counting", "_loop", "_running", "_until", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._counting = False
        self._until = 0.0
        self._running = False
        self._waiting: deque[Callable[[], None]] = deque()

    def over(self) -> bool:
        """Whether the budget of this iteration is spent; the first call in an iteration starts the count."""
        if self._counting:
            return self._clock() >= self._until
        self._counting = True
        self._until = self._clock() + SHARE
        self._loop.call_soon(self._end)
        return False

    @property
    def spent(self) -> bool:
        """Whether the budget of this iteration is spent; unlike ``over``, never starts the count."""
        return self._counting and self._clock() >= self._until

    def later(self, work: Callable[[], None]) -> None:
        """Call ``work`` in a later iteration; queued calls run in order, at least one per iteration."""
        self._waiting.append(work)
        if not self._running:
            self._running = True
            self._loop.call_soon(self._run)

    def _end(self) -> None:
        self._counting = False

    def _run(self) -> None:
        waiting = self._waiting
        if len(waiting) > 1:
            self.over()  # the first check starts the count
        # Work scheduled from here on waits for the next iteration, so that I/O can run in between.
        for _ in range(len(waiting)):
            work = waiting.popleft()
            try:
                work()
            except Exception:
                LOG.exception("what a client sent could not be handled")  # the remaining work still runs
            if waiting and self.over():
                break
        if waiting:
            self._loop.call_soon(self._run)
        else:
            self._running = False


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
