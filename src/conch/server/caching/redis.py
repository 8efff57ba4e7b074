"""The response cache in a Redis server, which several servers may share.

Runs on the event loop. Redis limits its own memory (``maxmemory`` and its policy). Requests wait up to ``wait_timeout``
for a connection and up to ``socket_timeout`` for a response. After a timeout, requests run without Redis until it
responds again. If Redis refuses to store responses, lookups continue.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from importlib import import_module
from time import monotonic
from typing import Any, Final

from conch.core.errors import invalid, one_line, unavailable
from conch.machine import extras
from conch.server.caching.cache import CachedResponse, packed, unpacked
from conch.telemetry.exposition import Family

#: Delays after consecutive failed attempts (s); the last delay repeats.
PAUSES: Final = (1.0, 2.0, 5.0, 10.0, 30.0)


class Availability:
    """Tracks whether a service is available.

    A single call may fail by chance, because of a stale connection or a busy event loop. After a failed call, the
    service is not used until an attempt succeeds. The first attempt is due at once; if it fails, the service counts as
    down.
    """

    def __init__(self) -> None:
        #: Whether to use the service.
        self.up = True
        self._next = 0.0
        self._attempting = False
        self._failed_attempts = 0

    def failed(self, now: float) -> None:
        """Record a call that failed at ``now`` (s)."""
        if self.up:
            self.up = False
            self._next = now

    def should_attempt(self, now: float) -> bool:
        """Whether to make an attempt now; after True, call ``attempt_failed`` or ``attempt_succeeded``."""
        if self.up or self._attempting or now < self._next:
            return False
        self._attempting = True
        return True

    def attempt_failed(self, now: float) -> float:
        """Record an attempt that failed at ``now`` (s).

        Returns the delay before the next attempt (s) if this was the first failure, else 0.
        """
        pause = PAUSES[min(self._failed_attempts, len(PAUSES) - 1)]
        self._attempting = False
        self._failed_attempts += 1
        self._next = now + pause
        return pause if self._failed_attempts == 1 else 0.0

    def attempt_succeeded(self) -> bool:
        """Record a successful attempt; return whether the service was down."""
        was_down = self._failed_attempts > 0
        self.up, self._attempting, self._failed_attempts = True, False, 0
        return was_down


LOG = logging.getLogger("conch")

#: Settings of ``--cache-config=redis,...`` with their defaults; times in milliseconds. Triton's client waits forever
#: with a timeout of 0; here, requests never do.
SETTINGS: Final[Mapping[str, str]] = {
    "host": "", "port": "", "user": "", "password": "", "db": "0", "connect_timeout": "1000", "socket_timeout": "100",
    "pool_size": "8", "wait_timeout": "100", "cert": "", "key": "", "cacert": "", "cacert_dir": "",
}  # fmt: skip
_NUMBERS: Final = frozenset({"port", "db", "connect_timeout", "socket_timeout", "pool_size", "wait_timeout"})
_OF_TLS: Final = ("cert", "key", "cacert", "cacert_dir")
#: Triton's environment variables for the user and password, which keep them out of process listings.
_ENVIRONMENT: Final = {"user": "TRITONCACHE_REDIS_USERNAME", "password": "TRITONCACHE_REDIS_PASSWORD"}

#: A key that never exists; an attempt reads it to test the connection.
_NO_KEY: Final = b"conch:"
#: Maximum size of responses that wait to be written to Redis (bytes); further responses are not cached.
MOST_BYTES_WAITING: Final = 64 << 20


class RedisCache:
    """A response cache in a Redis server; ``now`` is the clock for attempts (s).

    Raises INVALID_ARG for invalid settings, and UNSUPPORTED if the ``redis`` package is not installed.
    """

    lasting = True

    def __init__(self, options: Mapping[str, str], now: Callable[[], float] = monotonic) -> None:
        self._now = now
        settings = _complete(options)
        extras.require("the response cache in Redis", "redis")
        client = import_module("redis.asyncio")
        once = import_module("redis.asyncio.retry").Retry(import_module("redis.backoff").NoBackoff(), 0)
        self.address = f"{settings['host']}:{settings['port']}"
        encrypted = any(settings[name] for name in _OF_TLS)
        connections = max(int(settings["pool_size"]), 1)
        self._timeout = _seconds(settings["socket_timeout"]) or _seconds(SETTINGS["socket_timeout"])
        self._wait = int(settings["wait_timeout"]) / 1000
        self._pool = client.BlockingConnectionPool(
            connection_class=client.SSLConnection if encrypted else client.Connection,
            host=settings["host"],
            port=int(settings["port"]),
            db=int(settings["db"]),
            username=settings["user"] or None,
            password=settings["password"] or None,
            socket_connect_timeout=_seconds(settings["connect_timeout"]),
            socket_timeout=self._timeout,
            max_connections=connections,
            retry=once,
            **(_tls(settings) if encrypted else {}),
        )
        self._client = client.Redis(connection_pool=self._pool)
        #: The client's exception if Redis refuses a command.
        self._refusal: type[Exception] = import_module("redis.exceptions").ResponseError
        # Acquired before a connection is used, so that the wait for a connection does not count as a timeout of Redis.
        self._connections = asyncio.Semaphore(connections)
        # Limits writes, so that connections remain for lookups, for which requests wait.
        self._stores = asyncio.Semaphore(max(connections // 2, 1))
        self._reading = Availability()
        self._storing = Availability()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = 0

    def scope(self, model: str, version: int, identity: bytes) -> RedisScope:
        return RedisScope(self, f"conch:{model}:{version}:{identity.hex()}:".encode(errors="surrogatepass"))

    def available(self) -> bool:
        """Whether to use Redis; if not, may start an attempt in the background."""
        if self._reading.up:
            return True
        if self._reading.should_attempt(self._now()):
            self._begin(self._attempt())
        return False

    async def get(self, key: bytes) -> CachedResponse | None:
        """Return the response for ``key``; None for a miss, without a free connection, or after a timeout or error."""
        data = await self.read(key)
        try:
            return unpacked(data) if data is not None else None
        except ValueError as error:
            self._warn_of_entry(error)
            return None

    async def read(self, key: bytes) -> bytes | None:
        """Return the data for ``key``; None as for :meth:`get`."""
        try:
            async with asyncio.timeout(self._wait):
                await self._connections.acquire()
        except TimeoutError:
            return None
        try:
            async with asyncio.timeout(self._timeout):
                data: bytes | None = await self._client.get(key)
        except Exception as error:
            if str(error).startswith("WRONGTYPE"):
                self._warn_of_entry(error)
            else:
                self._reading.failed(self._now())
            return None
        finally:
            self._connections.release()
        return data

    def put(self, key: bytes, entry: CachedResponse) -> None:
        """Store a response in the background, unless too many writes wait or Redis refuses to store responses."""
        self.write(key, partial(packed, entry), entry.size)

    def write(
        self,
        key: bytes,
        pack: Callable[[], bytes],
        size: int,
        seconds: int | None = None,
        done: Callable[[], None] = lambda: None,
    ) -> bool:
        """Store what ``pack`` returns, ``size`` bytes, for ``seconds``, as :meth:`put` does; then call ``done``.

        Returns whether the writing has begun.
        """
        attempt = not self._storing.up
        if self._waiting + size <= MOST_BYTES_WAITING and (not attempt or self._storing.should_attempt(self._now())):
            self._waiting += size
            self._begin(self._set(key, pack, size, seconds, attempt)).add_done_callback(lambda task: done())
            return True
        done()
        return False

    async def remove(self, key: bytes) -> None:
        """Remove the data for ``key``. Raises UNAVAILABLE if Redis is."""
        try:
            async with asyncio.timeout(self._wait), self._connections:
                await self._client.delete(key)
        except Exception:
            self._reading.failed(self._now())
            raise unavailable("the Redis of the response cache does not respond") from None

    def families(self) -> Iterable[Family]:
        """Return no metrics, because other servers share the cache."""
        return ()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool.aclose()

    async def _set(self, key: bytes, pack: Callable[[], bytes], size: int, seconds: int | None, attempt: bool) -> None:
        try:
            async with self._stores, self._connections:
                await self._client.set(key, pack(), ex=seconds)
        except Exception as error:
            refused = isinstance(error, self._refusal)
            if not refused:
                self._reading.failed(self._now())
            if attempt:
                pause = self._storing.attempt_failed(self._now())
                self._log_down("store responses", "new entries in the response cache", error, pause)
            elif refused:
                self._storing.failed(self._now())
        else:
            if attempt and self._storing.attempt_succeeded():
                LOG.info("the Redis at %s stores responses again", self.address)
        finally:
            self._waiting -= size

    async def _attempt(self) -> None:
        try:
            async with self._connections:
                await self._client.get(_NO_KEY)
        except Exception as error:
            self._log_down("respond", "the response cache", error, self._reading.attempt_failed(self._now()))
        else:
            if self._reading.attempt_succeeded():
                LOG.info("the Redis at %s is available again: the response cache is used", self.address)

    def _log_down(self, what: str, without: str, error: Exception, pause: float) -> None:
        """Log that Redis no longer does ``what``, so that requests run ``without`` something.

        Does nothing if ``pause`` (s) is 0, because that has been logged.
        """
        if pause:
            text = "the Redis at %s does not %s (%s): requests run without %s; next attempt in %g s"
            LOG.warning(text, self.address, what, one_line(error), without, pause)

    def _warn_of_entry(self, error: Exception) -> None:
        LOG.warning("the Redis at %s has other data under a key of the response cache: %s", self.address, error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class RedisScope:
    """The cache scope of a model version; its entries outlive it, because the same files give the same responses."""

    def __init__(self, cache: RedisCache, prefix: bytes) -> None:
        self._cache = cache
        self._prefix = prefix
        self._ended = False

    def find(self, key: bytes) -> Any:
        return self._cache.get(self._prefix + key) if self._cache.available() else None

    def insert(self, key: bytes, entry: CachedResponse) -> bool:
        if not self._ended and self._cache.available():
            self._cache.put(self._prefix + key, entry)
        return True

    def forget(self) -> None:
        self._ended = True


def _complete(options: Mapping[str, str]) -> dict[str, str]:
    unknown = sorted(options.keys() - SETTINGS.keys())
    if unknown:
        raise invalid(
            f"Failed to initialize RedisCache: it has no setting '{unknown[0]}', only {', '.join(sorted(SETTINGS))}"
        )
    if not options.get("host") or not options.get("port"):
        raise invalid(
            "Failed to initialize RedisCache, didn't specify address. Must at a minimum specify 'host' and 'port' in "
            "the configuration - e.g. --cache-config=redis,host=redis --cache-config=redis,port=6379"
        )
    settings = {
        **SETTINGS,
        **{name: os.environ.get(variable, "") for name, variable in _ENVIRONMENT.items()},
        **options,
    }
    for name in _NUMBERS:
        if not (settings[name].isascii() and settings[name].isdigit()):
            raise invalid(f"Failed to initialize RedisCache: '{name}' is '{settings[name]}', which is not a number")
    return settings


def _seconds(milliseconds: str) -> float | None:
    return int(milliseconds) / 1000 or None


def _tls(settings: Mapping[str, str]) -> dict[str, Any]:
    names = {"cert": "ssl_certfile", "key": "ssl_keyfile", "cacert": "ssl_ca_certs", "cacert_dir": "ssl_ca_path"}
    return {option: settings[name] for name, option in names.items() if settings[name]}
