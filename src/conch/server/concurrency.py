"""Runs coroutines concurrently, and cleans up after cancellation and errors. Runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

LOG = logging.getLogger("conch")

T = TypeVar("T")


async def gather_all(
    starts: Iterable[Coroutine[Any, Any, T]], undo: Callable[[T], Awaitable[object]]
) -> list[T | BaseException]:
    """Run coroutines concurrently; return their results or errors in order.

    If this call is cancelled, calls ``undo`` for the results of coroutines that completed all the same.
    """
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        return await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(undo(result) for result in results if not isinstance(result, BaseException)))
        raise


async def end_all(what: str, *endings: Awaitable[object]) -> None:
    """Wait for all ``endings``; log each error as a failure to ``what`` instead of raising it."""
    for result in await asyncio.gather(*endings, return_exceptions=True):
        if isinstance(result, Exception):
            LOG.error("failed to %s", what, exc_info=result)
