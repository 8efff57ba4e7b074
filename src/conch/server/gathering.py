"""Starts that run together and leave nothing behind when they are given up.  Runs on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_all(
    starts: Iterable[Coroutine[Any, Any, T]], undo: Callable[[T], Awaitable[object]]
) -> list[T | BaseException]:
    """The results or errors of all, in their order; when this is cancelled, those that have a result are undone."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        return await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(undo(result) for result in results if not isinstance(result, BaseException)))
        raise
