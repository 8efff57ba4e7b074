"""Limits how many model versions load at the same time, because loads compete for memory and cores.

Owned by the rollout; runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

#: Releases a load slot before the load has ended; may be called more than once.
ReleaseLoadSlot = Callable[[], None]


class LoadSlots:
    """A number of load slots. A stalled load releases its slot so that other models can load."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    @asynccontextmanager
    async def take(self) -> AsyncIterator[ReleaseLoadSlot]:
        """Acquire a slot for the block; the yielded function releases it earlier."""
        await self._free.acquire()
        held = True

        def leave() -> None:
            nonlocal held
            if held:
                held = False
                self._free.release()

        try:
            yield leave
        finally:
            leave()


@asynccontextmanager
async def no_load_slot() -> AsyncIterator[ReleaseLoadSlot]:
    """Replaces :meth:`LoadSlots.take` for a load that needs no slot."""
    yield lambda: None
