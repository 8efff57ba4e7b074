"""Bounds how many model versions load at the same time, so that they do not take each other's memory and cores.

Belongs to the rollout; on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

#: Gives a place up before the load has ended; may be called more than once.
ReleaseLoadSlot = Callable[[], None]


class LoadSlots:
    """``count`` places.  A load that stands still takes nothing from others, and leaves its place to them."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    @asynccontextmanager
    async def take(self) -> AsyncIterator[ReleaseLoadSlot]:
        """A place, which is left at the end of the block or earlier."""
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
    """For a load that needs none."""
    yield lambda: None
