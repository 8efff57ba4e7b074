"""Thread pools for calls that may hang; closing a pool ends every wait for its results.

Unlike the threads of ``concurrent.futures.ThreadPoolExecutor``, these do not keep the process alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from conch.core.errors import ConchError, unavailable

_Result = TypeVar("_Result")
_Work = tuple["Future[Any]", Callable[[], Any]] | None


class DaemonPool:
    """Runs calls in at most ``limit`` threads, started on demand."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._queue: SimpleQueue[_Work] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._threads: list[threading.Thread] = []
        #: Indices of the threads that are running a call.
        self._calling: set[int] = set()
        self.closed = threading.Event()

    def submit(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Schedule ``call``; raises UNAVAILABLE if the pool is closed."""
        future: Future[_Result] = Future()
        with self._lock:
            if self.closed.is_set():
                raise _stopping()
            self._pending.add(future)
            if (number := len(self._threads)) < min(self._limit, len(self._pending)):
                name = f"{self._name}-{number + 1}"
                thread = threading.Thread(target=self._work, args=(number,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        future.add_done_callback(self._forget)
        self._queue.put((future, call))
        return future

    def run(self, call: Callable[[], _Result]) -> _Result:
        """Run ``call`` in the pool and return its result; raises UNAVAILABLE as soon as the pool is closed."""
        return self.submit(call).result()

    def close(self) -> None:
        """Fail pending calls with UNAVAILABLE, and accept no more calls; running calls continue, without a result.

        Waits only for idle threads to end.
        """
        with self._lock:
            self.closed.set()
            pending = list(self._pending)
            idle = [thread for number, thread in enumerate(self._threads) if number not in self._calling]
        for future in pending:
            with suppress(InvalidStateError):
                future.set_exception(_stopping())
        for _ in self._threads:
            self._queue.put(None)
        for thread in idle:
            thread.join()

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)

    def _work(self, number: int) -> None:
        while (work := self._queue.get()) is not None:
            future, call = work
            with self._lock:
                if self.closed.is_set() or future.done():
                    continue
                self._calling.add(number)
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:
                error = raised
            with self._lock:
                self._calling.discard(number)
            with suppress(InvalidStateError):
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del work, future, call, result, error  # an idle thread must not keep results alive


class SharedCalls:
    """Runs the calls of each key one at a time, and shares each call between all callers that came before its start.

    Therefore no result is older than its caller's request, and a key with a hanging call occupies only one thread of
    ``pool``.
    """

    def __init__(self, pool: DaemonPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._next: dict[str, Future[Any]] = {}

    def submit(self, key: str, call: Callable[[], _Result]) -> Future[_Result]:
        """Schedule ``call``, which must be the same for all callers with ``key``; it fails if the pool is closed."""
        with self._lock:
            future: Future[_Result] | None = self._next.get(key)
            if future is not None:
                return future
            future = Future()
            if key in self._running:
                self._next[key] = future
                return future
            self._running.add(key)
        self._make(key, call, future)
        return future

    def _make(self, key: str, call: Callable[[], Any], future: Future[Any]) -> None:
        try:
            inner = self._pool.submit(call)
        except ConchError as error:
            inner = Future()
            inner.set_exception(error)
        inner.add_done_callback(partial(self._made, key, call, future))

    def _made(self, key: str, call: Callable[[], Any], future: Future[Any], inner: Future[Any]) -> None:
        error = inner.exception()
        with suppress(InvalidStateError):
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(inner.result())
        with self._lock:
            following = self._next.pop(key, None)
            if following is None:
                self._running.discard(key)
                return
        self._make(key, call, following)


def _stopping() -> Exception:
    return unavailable("the server is stopping and no longer reads model repositories")
