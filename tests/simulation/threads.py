"""Threads of a simulation: greenlets that block in virtual time.

A thread runs until it blocks (:func:`block`, or a wait of :class:`Threading`) or ends; the loop draws the duration of
calls in virtual time. ``Threading``, ``SimulatedQueue``, ``SimulatedFuture`` and :func:`wait_for` replace names that
conch's modules import from the standard library.
"""

from __future__ import annotations

import threading
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future
from functools import partial
from typing import Any

from greenlet import getcurrent, greenlet

from tests.simulation.loop import SimulatedLoop


class SimulatedPool:
    """The threads of an executor: at most ``size`` calls at a time, started in the order of submission."""

    def __init__(self, loop: SimulatedLoop, size: int) -> None:
        self._loop = loop
        self._free = size
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Schedule ``call`` in a thread."""
        future: Future[Any] = Future()
        self._queue.append((future, call))
        self._start()
        return future

    def _start(self) -> None:
        while self._free and self._queue:
            future, call = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            self._free -= 1
            SimulatedThread(self._loop, partial(self._run, future, call)).start()

    def _run(self, future: Future[Any], call: Callable[[], Any]) -> None:
        block(self._loop.duration_of(call))
        try:
            result = call()
        except BaseException as error:
            self._finish(future.set_exception, error)
        else:
            self._finish(future.set_result, result)

    def _finish(self, end: Callable[[Any], None], value: Any) -> None:
        block(self._loop.latency(0.0002))
        self._free += 1
        end(value)
        self._start()


class SimulatedThread:
    """A thread that runs ``work``; after it has blocked, an event of the loop calls it to continue."""

    def __init__(self, loop: SimulatedLoop, work: Callable[[], None]) -> None:
        self.loop = loop
        self._work = work
        # It returns to the loop when it blocks, no matter which greenlet creates it.
        maker = getcurrent()
        self._greenlet = _Body(self._run, maker.parent if isinstance(maker, _Body) else maker)
        self._greenlet.thread = self

    def start(self) -> None:
        """Schedule the start of the thread."""
        self.loop.busy_threads += 1
        self.loop.later(self.loop.latency(0.0001), self)

    def join(self) -> None:
        """Do nothing: a thread that has completed its work ends in virtual time."""

    def wake(self, *ignored: object) -> None:
        """Let a waiting thread continue, because its event has happened."""
        self.loop.later(self.loop.latency(0.0001), self)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self.loop.busy_threads -= 1

    def __call__(self) -> None:
        """Run the thread until it blocks or ends; call from an event of the loop, never from another thread."""
        _set_running_loop(None)
        try:
            self._greenlet.switch()
        finally:
            _set_running_loop(self.loop)


class _Body(greenlet):
    thread: SimulatedThread


def current_thread() -> SimulatedThread | None:
    """Return the running simulated thread; None for the loop's thread."""
    body = getcurrent()
    return body.thread if isinstance(body, _Body) else None


def block(seconds: float) -> None:
    """Block the running simulated thread for ``seconds``."""
    thread = current_thread()
    assert thread is not None, "only a thread may block"
    thread.loop.later(seconds, thread)
    suspend()


def suspend() -> None:
    """Block the running simulated thread until something calls it."""
    body = getcurrent()
    assert body.parent is not None
    body.parent.switch()


class Threading:
    """The part of ``threading`` that conch uses, for the threads of a simulation."""

    Lock = staticmethod(threading.Lock)  # never held by a thread that blocks

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def Thread(self, target: Callable[..., None], args: tuple[Any, ...] = (), **options: Any) -> SimulatedThread:
        return SimulatedThread(self._loop, partial(target, *args))

    def Event(self) -> SimulatedEvent:
        return SimulatedEvent(self._loop)


class SimulatedEvent:
    """``threading.Event``."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._set = False
        self._waiting: list[_Waiter] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            waiter = _Waiter(current_thread())
            self._waiting.append(waiter)
            if timeout is not None:
                self._loop.later(timeout, waiter)
            suspend()
        return self._set


class _Waiter:
    """Lets a thread continue once, at the first of several events."""

    def __init__(self, thread: SimulatedThread | None) -> None:
        assert thread is not None, "the event loop would block"
        self._thread: SimulatedThread | None = thread

    def __call__(self, *ignored: object) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.wake()


class SimulatedQueue:
    """``queue.SimpleQueue`` for a thread's work; each item takes some time."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._items: deque[Any] = deque()
        self._waiting: deque[SimulatedThread] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._waiting.popleft().wake()

    def get(self) -> Any:
        while not self._items:
            thread = current_thread()
            assert thread is not None, "the event loop would block"
            self._waiting.append(thread)
            self._loop.busy_threads -= 1
            suspend()
            self._loop.busy_threads += 1
        item = self._items.popleft()
        if item is not None:
            block(self._loop.duration_of(item[1]))
        return item


class SimulatedFuture(Future[Any]):
    """``concurrent.futures.Future``; a simulated thread may wait for its result."""

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            thread = current_thread()
            waiter = _Waiter(thread)
            self.add_done_callback(waiter)
            if timeout is not None and thread is not None:
                thread.loop.later(timeout, waiter)
            suspend()
        return super().result(0)


def wait_for(futures: Iterable[Future[Any]], return_when: str = "ALL_COMPLETED") -> None:
    """``concurrent.futures.wait`` for a simulated thread."""
    pending = [future for future in futures if not future.done()]
    while pending:
        waiter = _Waiter(current_thread())
        for future in pending:
            future.add_done_callback(waiter)
        suspend()
        if return_when == FIRST_EXCEPTION and any(future.done() and future.exception() for future in futures):
            return
        pending = [future for future in pending if not future.done()]
