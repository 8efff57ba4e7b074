"""The response cache in the server's memory: least recently used entries are evicted above a size limit.

Runs on the event loop; a pure state machine, except for the durations that it measures.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from time import monotonic_ns
from typing import Final

from conch.server.caching.cache import CachedResponse
from conch.telemetry.exposition import Family, Metric, MetricSample

LOG = logging.getLogger("conch")

_METRICS: Final = (
    Metric("nv_cache_util", "gauge", "Cache utilization [0.0 - 1.0]"),
    Metric("nv_cache_num_entries", "gauge", "Number of responses stored in response cache"),
    Metric("nv_cache_num_hits", "gauge", "Number of cache hits in response cache"),
    Metric("nv_cache_num_misses", "gauge", "Number of cache misses in response cache"),
    Metric("nv_cache_num_lookups", "gauge", "Number of cache lookups in response cache"),
    Metric("nv_cache_num_evictions", "gauge", "Number of cache evictions in response cache"),
    Metric("nv_cache_lookup_duration", "gauge", "Total cache lookup duration (hit and miss), in microseconds"),
    Metric("nv_cache_insertion_duration", "gauge", "Total cache insertion duration, in microseconds"),
)


#: Maximum number of request messages stored with an entry; clients of several protocols and libraries may send the same
#: request as different messages.
MOST_MESSAGES: Final = 4


@dataclass(slots=True)
class _Kept:
    """A stored entry; ``size`` includes the messages and encoded responses stored with it (bytes)."""

    scope: LocalScope
    entry: CachedResponse
    size: int
    messages: tuple[Hashable, ...] = ()


class LocalCache:
    """A cache of at most ``size`` bytes that evicts the least recently used entries."""

    lasting = False

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self.hits = 0
        self.lookups = 0
        self.evictions = 0
        self._lookup_ns = 0
        self._insertion_ns = 0
        self._entries: OrderedDict[tuple[int, bytes], _Kept] = OrderedDict()
        self._scopes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def scope(self, model: str, version: int, identity: bytes) -> LocalScope:
        self._scopes += 1
        return LocalScope(self, self._scopes, f"'{model}' version {version}")

    def find(self, key: tuple[int, bytes]) -> CachedResponse | None:
        start = monotonic_ns()
        self.lookups += 1
        stored = self._entries.get(key)
        if stored is not None:
            self.hits += 1
            self._entries.move_to_end(key)
        self._lookup_ns += monotonic_ns() - start
        return stored.entry if stored is not None else None

    def insert(self, key: tuple[int, bytes], scope: LocalScope, entry: CachedResponse) -> bool:
        """Store an entry; return False if the key already has one.

        An entry larger than the whole cache is not stored, which is logged.
        """
        if key in self._entries:
            return False
        start = monotonic_ns()
        if entry.size > self.size:
            scope.note_too_large(key[1], entry.size, self.size)
            return True
        self._make_room(entry.size)
        self._entries[key] = _Kept(scope, entry, entry.size)
        scope.keys.add(key[1])
        self.used += entry.size
        self._insertion_ns += monotonic_ns() - start
        return True

    def attach(
        self, key: tuple[int, bytes], entry: CachedResponse, message: Hashable, encoded: object, size: int
    ) -> None:
        """Store the response ``encoded`` with ``entry``, by the request ``message`` that it belongs to.

        If several identical requests end before the first message is attached, only one is stored.
        """
        kept = self._entries.get(key)
        if kept is None or kept.entry is not entry or message in kept.scope.responses:
            return
        if len(kept.messages) == MOST_MESSAGES or kept.size + size > self.size // 2:
            return
        self._entries.move_to_end(key)
        self._make_room(size)
        kept.messages += (message,)
        kept.size += size
        self.used += size
        kept.scope.responses[message] = key[1], encoded

    def remove(self, key: tuple[int, bytes]) -> None:
        kept = self._entries.pop(key)
        self.used -= kept.size
        kept.scope.keys.discard(key[1])
        for message in kept.messages:
            del kept.scope.responses[message]

    def _make_room(self, size: int) -> None:
        while self.used + size > self.size:
            self.remove(next(iter(self._entries)))
            self.evictions += 1

    def families(self) -> Iterator[Family]:
        numbers = (
            self.used / self.size, len(self._entries), self.hits, self.lookups - self.hits, self.lookups,
            self.evictions, self._lookup_ns // 1000, self._insertion_ns // 1000,
        )  # fmt: skip
        for metric, value in zip(_METRICS, numbers, strict=True):
            yield metric, [MetricSample("", value)]

    async def close(self) -> None:
        for key in list(self._entries):
            self.remove(key)


class LocalScope:
    """The cache scope of one loaded version; each load has its own number, so that loads never share entries."""

    def __init__(self, cache: LocalCache, number: int, title: str) -> None:
        self.title = title
        self.keys: set[bytes] = set()
        #: The cache key and the encoded response for each request message.
        self.responses: dict[Hashable, tuple[bytes, object]] = {}
        self._cache = cache
        self._number = number
        self._ended = False
        self._noted = False

    def find(self, key: bytes) -> CachedResponse | None:
        return self._cache.find((self._number, key))

    def insert(self, key: bytes, entry: CachedResponse) -> bool:
        return self._ended or self._cache.insert((self._number, key), self, entry)

    def forget(self) -> None:
        self._ended = True
        for key in list(self.keys):
            self._cache.remove((self._number, key))

    def find_message(self, message: Hashable) -> object | None:
        """Return the encoded response for an identical earlier message, while its entry is cached."""
        known = self.responses.get(message)
        if known is None:
            return None
        self._cache.find((self._number, known[0]))
        return known[1]

    def attach(self, key: bytes, entry: CachedResponse, message: Hashable, encoded: object, size: int) -> None:
        self._cache.attach((self._number, key), entry, message, encoded, size)

    def note_too_large(self, key: bytes, size: int, limit: int) -> None:
        """Log once that a response is too large to be cached."""
        if not self._noted:
            self._noted = True
            LOG.error(
                "Failed to insert key [%s] into response cache: Requested byte_size: %d is greater than total cache "
                "size: %d (responses of %s)", key.hex(), size, limit, self.title,
            )  # fmt: skip
