"""Responds to requests from the response cache, in front of the executor of a model version.

The loader gives a model whose configuration enables the cache a ``CacheLookup``, if the server has a cache. Identical
requests that run at the same time all run, as in Triton. Front ends also look up each encoded message, as identical
messages are identical requests: encoded responses are stored with their cache entry and removed with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from time import monotonic_ns
from typing import Any, Final, cast

from conch.core.errors import ConchError, cancelled, error_text, internal
from conch.core.inference import InferRequest, InferResponse
from conch.machine.threads import compute
from conch.server.caching.cache import CachedResponse, CacheScope, input_bytes, kept, request_key
from conch.server.caching.local import LocalScope
from conch.server.execution.executor import Executor
from conch.telemetry.statistics import ModelStatistics

LOG = logging.getLogger("conch")

#: Maximum size of inputs that are hashed on the event loop (bytes); hashing larger ones takes milliseconds, in a
#: thread.
MOST_BYTES_AT_ONCE: Final = 1 << 20


class CacheLookup:
    """Looks up the requests of a model version in the response cache, and submits the others to ``executor``.

    ``scope`` returns the current cache scope.
    """

    def __init__(self, executor: Executor, scope: Callable[[], CacheScope], statistics: ModelStatistics) -> None:
        self._executor = executor
        self._scope = scope
        self._statistics = statistics
        #: The cache of encoded messages; None if the responses are not in this server's memory.
        self.messages: CachedMessages | None = None
        if isinstance(scope(), LocalScope):
            self.messages = CachedMessages(cast(Callable[[], LocalScope], scope), statistics)
        self._looking_up: dict[InferRequest, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    def submit(self, request: InferRequest) -> None:
        """Respond from the cache or submit the request to the executor; raises as the executor does.

        Requests of a sequence are not cached: their responses may depend on earlier requests, through a step of an
        ensemble, another server or a model that this one calls.
        """
        if request.correlation_id:
            self._executor.submit(request)
            return
        start = request.times.queued = monotonic_ns()
        request.hold_copies()  # the key is computed from them
        if request.shared is not None:
            request.shared.copies = True
        if input_bytes(request) > MOST_BYTES_AT_ONCE:
            self._look_up_later(request, self._scope(), b"", start)
            return
        key, scope = request_key(request), self._scope()
        cached = scope.find(key)
        if isinstance(cached, CachedResponse):
            _note_hit(request, key, cached, monotonic_ns() - start)
            # Deferred, because a caller may not expect a callback before it has sent all its requests.
            self._loop.call_soon(_respond, request, cached)
        elif cached is None:
            self._run(request, scope, key, monotonic_ns() - start)
        else:
            self._look_up_later(request, scope, key, start, cached)

    def fail_waiting(self, error: ConchError) -> None:
        """Fail the requests that are being looked up."""
        for request in list(self._looking_up):
            request.on_cancel = None
            request.fail(error)

    def forget(self) -> None:
        """Remove the responses of this version from the cache, if they would not outlive it."""
        self._scope().forget()

    def _look_up_later(
        self, request: InferRequest, scope: CacheScope, key: bytes, start: int, cached: Any = None
    ) -> None:
        request.on_cancel = _cancel
        task = self._loop.create_task(self._look_up_or_fail(request, scope, key, start, cached))
        self._looking_up[request] = task
        task.add_done_callback(lambda task: self._looking_up.pop(request, None))

    async def _look_up_or_fail(
        self, request: InferRequest, scope: CacheScope, key: bytes, start: int, cached: Any
    ) -> None:
        try:
            await self._look_up(request, scope, key, start, cached)
        except ConchError as error:
            request.fail(error)
        except Exception as error:
            LOG.exception("the lookup of a request in the response cache failed")
            request.fail(internal(error_text(error)))

    async def _look_up(self, request: InferRequest, scope: CacheScope, key: bytes, start: int, cached: Any) -> None:
        if not key:
            key = await compute(request_key, request)
            cached = scope.find(key)
        if cached is not None and not isinstance(cached, CachedResponse):
            cached = await cached
        if request.finished:
            return
        request.on_cancel = None
        lookup = monotonic_ns() - start
        if cached is None:
            self._run(request, scope, key, lookup)
        else:
            _note_hit(request, key, cached, lookup)
            _respond(request, cached)

    def _run(self, request: InferRequest, scope: CacheScope, key: bytes, lookup: int) -> None:
        request.observe(_Miss(scope, self._scope, self._statistics, key, lookup).observe)
        self._executor.submit(request)


class _Miss:
    """Adds the response of a request to the cache.

    The response is cached only if ``now`` returns the scope that was current when the request arrived.
    """

    __slots__ = ("_key", "_lookup", "_now", "_response", "_scope", "_statistics", "_worth_keeping")

    def __init__(
        self,
        scope: CacheScope,
        now: Callable[[], CacheScope],
        statistics: ModelStatistics,
        key: bytes,
        lookup: int,
    ) -> None:
        self._scope = scope
        self._now = now
        self._statistics = statistics
        self._key = key
        self._lookup = lookup
        self._response: CachedResponse | None = None
        self._worth_keeping = True

    def observe(self, response: InferResponse) -> None:
        start = monotonic_ns()
        if response.error is not None or (response.outputs and self._response is not None):
            self._worth_keeping = False
        elif response.outputs:
            self._response = kept(response.outputs, response.parameters)
        if response.final:
            new = True
            if self._worth_keeping and self._response is not None and self._now() is self._scope:
                new = self._scope.insert(self._key, self._response)
            if new:
                self._statistics.record_cache_miss(self._lookup + monotonic_ns() - start)


#: Maximum message size (bytes): for larger messages, the lookup takes longer than it saves.
MOST_MESSAGE_BYTES: Final = 4 << 10
#: Approximate memory overhead of a message and its encoded response (bytes).
_OVERHEAD: Final = 500


class CachedMessages:
    """Encoded responses of a model version by request message; ``scope`` returns the current cache scope."""

    def __init__(self, scope: Callable[[], LocalScope], statistics: ModelStatistics) -> None:
        self._scope = scope
        self._statistics = statistics

    def find(self, message: Hashable) -> object | None:
        """Return the encoded response to an identical earlier message and record a cache hit; None if there is none."""
        start = monotonic_ns()
        response = self._scope().find_message(message)
        if response is not None:
            took = monotonic_ns() - start
            self._statistics.record_cache_hit(took, took, took)
        return response

    def keep(self, request: InferRequest, message: Hashable, response: object, size: int) -> None:
        """Store ``response``, an encoded response, if the response cache responded to ``request``.

        ``size`` is that of the response and its message (bytes). Requests with an ID are skipped.
        """
        entry = request.times.entry
        if isinstance(entry, CachedResponse) and not request.id:
            self._scope().attach(request.times.key, entry, message, response, size + _OVERHEAD)


def _note_hit(request: InferRequest, key: bytes, entry: CachedResponse, lookup: int) -> None:
    request.times.lookup, request.times.key, request.times.entry = lookup, key, entry


def _respond(request: InferRequest, cached: CachedResponse) -> None:
    request.respond(cached.response())


def _cancel(request: InferRequest) -> None:
    request.fail(cancelled())
