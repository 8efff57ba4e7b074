"""Responds to requests from the response cache, in front of the executor of a model version.

The loader puts a ``CachedExecutor`` before the executor of a model whose configuration enables the cache, if the server
has a cache. Identical requests that run at the same time all run, as in Triton.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, Final, cast

from conch.core.errors import ConchError, cancelled
from conch.core.inference import InferRequest, InferResponse
from conch.machine.threads import compute
from conch.server.cached_messages import CachedMessages
from conch.server.caching.cache import CacheScope
from conch.server.caching.entries import CachedResponse, kept
from conch.server.caching.keys import input_bytes, request_key
from conch.server.caching.local import LocalScope
from conch.server.model import Executor
from conch.server.schedulers.ordering import InOrder
from conch.telemetry.statistics import ModelStatistics
from conch.workers.host.process import WorkerProcess

#: Maximum size of inputs that are hashed on the event loop (bytes); hashing larger ones takes milliseconds, in a
#: thread.
MOST_BYTES_AT_ONCE: Final = 1 << 20


class CachedExecutor:
    """An executor behind the response cache; see :class:`conch.server.model.Executor`.

    ``scope`` returns the current cache scope. ``order`` is given for a model that preserves the order of its responses,
    including cached ones.
    """

    def __init__(
        self,
        inner: Executor,
        scope: Callable[[], CacheScope],
        statistics: ModelStatistics,
        order: InOrder | None = None,
    ) -> None:
        self.inner = inner
        self.scope = scope
        self.statistics = statistics
        self.order = order
        self._looking_up: dict[InferRequest, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def ready(self) -> bool:
        return self.inner.ready

    @property
    def away(self) -> str:
        return self.inner.away

    @property
    def processes(self) -> Sequence[WorkerProcess]:
        return self.inner.processes

    @property
    def sequences(self) -> int:
        return self.inner.sequences

    def continues(self, request: InferRequest) -> bool:
        return self.inner.continues(request)

    def submit(self, request: InferRequest) -> None:
        """Respond from the cache or enqueue the request; raises as the inner executor does.

        Requests of a sequence are not cached: their responses may depend on earlier requests, through a step of an
        ensemble, another server or a model that this one calls.
        """
        begun = request.times.queued = monotonic_ns()
        if not request.correlation_id:
            request.hold_copies()  # the key is computed from them
        if self.order is not None:
            self.order.admit(request)
        if request.correlation_id:
            self._submit(request)
            return
        if request.shared is not None:
            request.shared.copies = True
        if input_bytes(request) > MOST_BYTES_AT_ONCE:
            self._look_up_later(request, self.scope(), b"", begun)
            return
        key, scope = request_key(request), self.scope()
        cached = scope.find(key)
        if isinstance(cached, CachedResponse):
            _note_hit(request, key, cached, monotonic_ns() - begun)
            # Deferred, because a caller may not expect a callback before it has sent all its requests.
            self._loop.call_soon(_answer, request, cached)
        elif cached is None:
            self._run(request, scope, key, monotonic_ns() - begun)
        else:
            self._look_up_later(request, scope, key, begun, cached)

    def fail_waiting(self, error: ConchError) -> None:
        for request in list(self._looking_up):
            request.on_cancel = None
            request.fail(error)
        self.inner.fail_waiting(error)

    def set_log(self, levels: Mapping[str, Any]) -> None:
        self.inner.set_log(levels)

    def retire(self) -> None:
        self.inner.retire()

    def abandon(self) -> None:
        self.inner.abandon()

    async def stop(self, seconds: float | None) -> None:
        self.scope().forget()
        await self.inner.stop(seconds)

    def _look_up_later(
        self, request: InferRequest, scope: CacheScope, key: bytes, begun: int, cached: Any = None
    ) -> None:
        request.on_cancel = _give_up
        task = self._loop.create_task(self._look_up(request, scope, key, begun, cached))
        self._looking_up[request] = task
        task.add_done_callback(lambda task: self._looking_up.pop(request, None))

    async def _look_up(self, request: InferRequest, scope: CacheScope, key: bytes, begun: int, cached: Any) -> None:
        if not key:
            key = await compute(request_key, request)
            cached = scope.find(key)
        if cached is not None and not isinstance(cached, CachedResponse):
            cached = await cached
        if request.finished:
            return
        request.on_cancel = None
        lookup = monotonic_ns() - begun
        if cached is not None:
            _note_hit(request, key, cached, lookup)
            _answer(request, cached)
            return
        try:
            self._run(request, scope, key, lookup)
        except ConchError as error:
            request.fail(error)

    def _run(self, request: InferRequest, scope: CacheScope, key: bytes, lookup: int) -> None:
        request.observe(_Miss(scope, self.scope, self.statistics, key, lookup).observe)
        self._submit(request)

    def _submit(self, request: InferRequest) -> None:
        try:
            self.inner.submit(request)
        except ConchError as error:
            if self.order is None:
                raise
            request.fail(error)  # in order, and so that later responses are not blocked


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
        begun = monotonic_ns()
        if response.error is not None or (response.outputs and self._response is not None):
            self._worth_keeping = False
        elif response.outputs:
            self._response = kept(response.outputs, response.parameters)
        if response.final:
            new = True
            if self._worth_keeping and self._response is not None and self._now() is self._scope:
                new = self._scope.insert(self._key, self._response)
            if new:
                self._statistics.record_cache_miss(self._lookup + monotonic_ns() - begun)


def uncached(executor: Executor) -> Executor:
    """Return the executor behind the cache; without a cache, the executor itself."""
    return executor.inner if isinstance(executor, CachedExecutor) else executor


def repeats_of(executor: Executor) -> CachedMessages | None:
    """Return the message cache of an executor; None if its cache is not in the server or its responses are ordered."""
    if isinstance(executor, CachedExecutor) and executor.order is None and isinstance(executor.scope(), LocalScope):
        return CachedMessages(cast(Callable[[], LocalScope], executor.scope), executor.statistics)
    return None


def _note_hit(request: InferRequest, key: bytes, entry: CachedResponse, lookup: int) -> None:
    request.times.lookup, request.times.key, request.times.entry = lookup, key, entry


def _answer(request: InferRequest, cached: CachedResponse) -> None:
    request.respond(cached.response())


def _give_up(request: InferRequest) -> None:
    request.fail(cancelled())
