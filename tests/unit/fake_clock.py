"""An event loop whose clock jumps to the next timer when nothing else is to be done, so that no test waits."""

from __future__ import annotations

import asyncio
import functools
import selectors
import weakref
from collections.abc import Callable, Coroutine
from typing import Any


class FakeClockLoop(asyncio.SelectorEventLoop):
    """Sockets are real and are looked at before time passes; with threads under way, don't set timers."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = selectors.DefaultSelector()
        self._look = selector.select
        selector.select = self._select  # type: ignore[method-assign]
        super().__init__(selector)
        self._timers: list[weakref.ref[asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, *arguments: Any, **options: Any) -> asyncio.TimerHandle:
        timer = super().call_at(when, *arguments, **options)
        self._timers.append(weakref.ref(timer))
        return timer

    def pending_timers(self) -> list[asyncio.TimerHandle]:
        timers = [timer for reference in self._timers if (timer := reference()) is not None]
        return [timer for timer in timers if not timer.cancelled() and timer.when() > self.now]

    def _select(self, timeout: float | None = None) -> Any:
        events = self._look(0 if timeout is not None else None)
        if not events and timeout:
            self.now += timeout
        return events


def fake_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine function as a test on a loop of its own with such a clock, which starts at 0."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=FakeClockLoop) as runner:
            runner.run(test(**fixtures))

    return run


async def settle() -> None:
    """Let everything happen that needs no time to pass."""
    for _ in range(20):
        await asyncio.sleep(0)
