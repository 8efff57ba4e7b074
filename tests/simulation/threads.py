"""Threads of a simulation: greenlets that block in virtual time.

What a pool is given runs in a greenlet each.  It runs until it blocks (:func:`block`) or ends; how long each call takes
in virtual time is drawn by the loop.
"""

from __future__ import annotations

from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from greenlet import getcurrent, greenlet

from tests.simulation.loop import SimulatedLoop


class SimulatedPool:
    """At most ``size`` calls at a time, started in the order of their submission."""

    def __init__(self, loop: SimulatedLoop, size: int) -> None:
        self._loop = loop
        self._free = size
        self._queue: deque[tuple[Future[Any], Callable[[], Any], float]] = deque()

    def submit(self, call: Callable[[], Any], delay: float = 0.0) -> Future[Any]:
        """Have ``call`` made in a thread, where it takes ``delay`` seconds longer than others."""
        future: Future[Any] = Future()
        self._queue.append((future, call, delay))
        self._start()
        return future

    def _start(self) -> None:
        while self._free and self._queue:
            future, call, delay = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            self._free -= 1
            self._loop.busy_threads += 1
            seconds = delay + self._loop.latency(0.0002) + (self._loop.slow_calls.pop() if self._loop.slow_calls else 0)
            self._loop.later(seconds, SimulatedThread(self._loop, partial(self._run, future, call)))

    def _run(self, future: Future[Any], call: Callable[[], Any]) -> None:
        try:
            result = call()
        except BaseException as error:
            self._finish(future.set_exception, error)
        else:
            self._finish(future.set_result, result)

    def _finish(self, end: Callable[[Any], None], value: Any) -> None:
        block(self._loop.latency(0.0002))
        self._free += 1
        self._loop.busy_threads -= 1
        end(value)
        self._start()


class SimulatedThread:
    """A thread that runs ``work``; called to start it, and by itself to go on after it has blocked."""

    def __init__(self, loop: SimulatedLoop, work: Callable[[], None]) -> None:
        self.loop = loop
        self._greenlet = _Body(work)
        self._greenlet.thread = self

    def __call__(self) -> None:
        """Let it run until it blocks or ends; call from an event of the loop, never from another thread."""
        _set_running_loop(None)
        try:
            self._greenlet.switch()
        finally:
            _set_running_loop(self.loop)


class _Body(greenlet):
    thread: SimulatedThread


def current_thread() -> SimulatedThread | None:
    """The simulated thread that runs; None for the loop's."""
    body = getcurrent()
    return body.thread if isinstance(body, _Body) else None


def block(seconds: float) -> None:
    """Have the simulated thread that runs do nothing for ``seconds``."""
    thread = current_thread()
    assert thread is not None, "only a thread may block"
    thread.loop.later(seconds, thread)
    suspend()


def suspend() -> None:
    """Have the simulated thread that runs wait until something calls it."""
    body = getcurrent()
    assert body.parent is not None
    body.parent.switch()
