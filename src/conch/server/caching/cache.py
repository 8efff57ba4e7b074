"""The interface of response caches, independent of where entries are stored."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Protocol

from conch.server.caching.entries import CachedResponse
from conch.telemetry.exposition import Family


class CacheScope(Protocol):
    """The cache entries of one loaded model version, by cache key."""

    def find(self, key: bytes) -> CachedResponse | Awaitable[CachedResponse | None] | None:
        """Return the response for a key, None for a miss, or an awaitable of either; neither raises."""

    def insert(self, key: bytes, entry: CachedResponse) -> bool:
        """Store a response; return False if the key already has one, which is kept."""

    def forget(self) -> None:
        """End the scope because the version has been unloaded: its entries are not used again, and none are added."""


class NoEntries:
    """The scope of a version whose responses must not be cached; always empty."""

    def find(self, key: bytes) -> None:
        return None

    def insert(self, key: bytes, entry: CachedResponse) -> bool:
        return True

    def forget(self) -> None: ...


class ResponseCache(Protocol):
    """A cache for all models of the server; ``lasting`` is True if entries outlive the loaded versions."""

    lasting: bool

    def scope(self, model: str, version: int, identity: bytes) -> CacheScope:
        """Return the scope of a loading version; ``identity`` is a digest of everything its responses depend on."""

    def families(self) -> Iterable[Family]:
        """Return the metrics of the whole cache."""

    async def close(self) -> None:
        """Stop background work and release resources; called after the last request."""
