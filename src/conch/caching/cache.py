"""What a response cache is to the server, whatever keeps the entries."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Protocol

from conch.caching.entries import CachedResponse
from conch.telemetry.exposition import Family


class CacheScope(Protocol):
    """The entries of one loaded model version, by the digests of its requests."""

    def find(self, key: bytes) -> CachedResponse | Awaitable[CachedResponse | None] | None:
        """The response to a request, None for none; never raises, nor does what it returns to be awaited."""

    def insert(self, key: bytes, entry: CachedResponse) -> bool:
        """Keep a response; False when there is one already, which stays."""

    def forget(self) -> None:
        """The version has ended: its entries are of no more use, and none is kept any more."""


class NoEntries:
    """The entries of a version whose responses must not be kept: none."""

    def find(self, key: bytes) -> None:
        return None

    def insert(self, key: bytes, entry: CachedResponse) -> bool:
        return True

    def forget(self) -> None: ...


class ResponseCache(Protocol):
    """One cache for all models of the server; ``lasting`` where entries outlive the versions that they are of."""

    lasting: bool

    def scope(self, model: str, version: int, identity: bytes) -> CacheScope:
        """The entries of a version that is being loaded; ``identity`` is a digest of what it answers from."""

    def families(self) -> Iterable[Family]:
        """What the metrics page shows of the cache as a whole."""

    async def close(self) -> None:
        """End what it has begun; called after the last request."""
