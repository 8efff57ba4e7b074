"""Stores the responses of the Responses API, which later requests continue, in memory or in Redis.

Runs on the event loop. An entry is the response with its input, and expires after a time.
"""

from __future__ import annotations

from asyncio import Event, ensure_future
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic
from typing import Final, Protocol

from conch.server.caching.cache import ResponseCache
from conch.server.caching.redis import RedisCache

#: Approximate memory overhead of an entry (bytes).
_ENTRY_BYTES: Final = 500


class ResponseStore(Protocol):
    """Stores responses by their id."""

    def find(self, id: str) -> bytes | Awaitable[bytes | None] | None:
        """Return an entry, None if there is none, or an awaitable of either."""

    def put(self, id: str, entry: bytes) -> bool:
        """Store an entry, in the background if it is not in memory; return False if it is too large to be stored."""

    def remove(self, id: str) -> Awaitable[None] | None:
        """Remove an entry if there is one; the caller awaits the result if it is not None. Raises UNAVAILABLE."""


class LocalResponseStore:
    """Entries of at most ``size`` bytes in memory; the oldest are removed above that, and all after ``seconds``."""

    def __init__(self, size: int, seconds: float, now: Callable[[], float] = monotonic) -> None:
        self._size = size
        self._seconds = seconds
        self._now = now
        self._entries: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self.used = 0

    def find(self, id: str) -> bytes | None:
        self._make_room(0)
        entry = self._entries.get(id)
        return None if entry is None else entry[1]

    def put(self, id: str, entry: bytes) -> bool:
        size = len(entry) + _ENTRY_BYTES
        if size > self._size:
            return False
        self._make_room(size)
        self._entries[id] = self._now() + self._seconds, entry
        self.used += size
        return True

    def remove(self, id: str) -> None:
        _, entry = self._entries.pop(id, (0.0, None))
        if entry is not None:
            self.used -= len(entry) + _ENTRY_BYTES

    def _make_room(self, size: int) -> None:
        """Remove expired entries, and the oldest ones until ``size`` more bytes fit."""
        now = self._now()
        while self._entries:
            id, (expires, _) = next(iter(self._entries.items()))
            if expires > now and self.used + size <= self._size:
                return
            self.remove(id)


class RedisResponseStore:
    """Entries of at most ``size`` bytes in the Redis of the response cache, for ``seconds``.

    All servers that use it share them. Redis limits their memory.
    """

    def __init__(self, cache: RedisCache, size: int, seconds: int) -> None:
        self._cache = cache
        self._size = size
        self._seconds = seconds
        #: Entries that are being written, and the ends of the writing.
        self._unwritten: dict[str, tuple[bytes, Event]] = {}

    def find(self, id: str) -> bytes | Awaitable[bytes | None]:
        if id in self._unwritten:
            return self._unwritten[id][0]
        return ensure_future(self._cache.read(_key(id)))

    def put(self, id: str, entry: bytes) -> bool:
        if len(entry) > self._size:
            return False
        self._unwritten[id] = entry, Event()
        return self._cache.write(_key(id), lambda: entry, len(entry), self._seconds, partial(self._on_written, id))

    async def remove(self, id: str) -> None:
        if id in self._unwritten:
            await self._unwritten[id][1].wait()
        await self._cache.remove(_key(id))

    def _on_written(self, id: str) -> None:
        self._unwritten.pop(id)[1].set()


def _key(id: str) -> bytes:
    return f"conch:response:{id}".encode(errors="replace")


def make_store(cache: ResponseCache | None, size: int, seconds: int) -> ResponseStore | None:
    """Create the store: in the Redis of the response cache if it is there; None if ``size`` (bytes) is 0."""
    if not size:
        return None
    if isinstance(cache, RedisCache):
        return RedisResponseStore(cache, size, seconds)
    return LocalResponseStore(size, seconds)
