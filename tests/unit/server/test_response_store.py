"""Stored responses: bounded in bytes and time, in memory and in Redis."""

from __future__ import annotations

from conch.server.caching.local import LocalCache
from conch.server.response_store import LocalResponseStore, make_store


def test_oldest_responses_go_when_the_memory_is_full() -> None:
    store = LocalResponseStore(4000, 60, lambda: 0)
    for number in range(5):
        store.put(f"r{number}", bytes(500))
        assert store.used <= 4000
    assert [store.find(f"r{number}") is not None for number in range(5)] == [False, True, True, True, True]
    assert not store.put("huge", bytes(4000))
    assert store.find("huge") is None
    assert store.find("r4") is not None


def test_response_expires() -> None:
    now = 0.0
    store = LocalResponseStore(4000, 60, lambda: now)
    store.put("a", b"1")
    now = 59.9
    assert store.find("a") == b"1"
    store.put("b", b"2")
    now = 60
    assert store.find("a") is None
    assert store.find("b") == b"2"
    now = 120
    assert store.find("b") is None
    assert store.used == 0


def test_removed_response_frees_its_memory() -> None:
    store = LocalResponseStore(4000, 60, lambda: 0)
    store.put("a", b"1")
    store.remove("a")
    store.remove("a")
    assert (store.find("a"), store.used) == (None, 0)


def test_nothing_is_stored_with_a_size_of_zero() -> None:
    assert make_store(None, 0, 60) is None
    assert isinstance(make_store(LocalCache(1000), 1000, 60), LocalResponseStore)
