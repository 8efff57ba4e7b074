"""Shares the event loop's time among connections, so that none of them keeps it for long.

Whoever handles what a client sent asks :meth:`EventLoopBudget.over` after each piece, and puts the rest off with
:meth:`EventLoopBudget.later` once it is.  All connections of a front end share one, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

LOG = logging.getLogger("conch")

#: How long all connections together may work in one turn of the loop (s).
SHARE: Final = 0.005


class EventLoopBudget:
    """Counts the time of one turn of the loop, from the first question in it; ``clock`` is in seconds."""

    __slots__ = ("_clock", "_counting", "_loop", "_running", "_until", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._counting = False
        self._until = 0.0
        self._running = False
        self._waiting: deque[Callable[[], None]] = deque()

    def over(self) -> bool:
        """Whether this turn has had its share, and what is left must wait for another."""
        if self._counting:
            return self._clock() >= self._until
        self._counting = True
        self._until = self._clock() + SHARE
        self._loop.call_soon(self._end)
        return False

    @property
    def spent(self) -> bool:
        """Whether this turn's time is counted, because something took long in it, and has been spent."""
        return self._counting and self._clock() >= self._until

    def later(self, work: Callable[[], None]) -> None:
        """Call ``work`` in a later turn; those that wait are called in order, at least one in every turn."""
        self._waiting.append(work)
        if not self._running:
            self._running = True
            self._loop.call_soon(self._run)

    def _end(self) -> None:
        self._counting = False

    def _run(self) -> None:
        waiting = self._waiting
        if len(waiting) > 1:
            self.over()  # the first question begins the count
        # Whatever is put off again meanwhile waits for the next turn, so that input and output get theirs.
        for _ in range(len(waiting)):
            work = waiting.popleft()
            try:
                work()
            except Exception:
                LOG.exception("what a client sent could not be handled")  # others still have their turns
            if waiting and self.over():
                break
        if waiting:
            self._loop.call_soon(self._run)
        else:
            self._running = False
