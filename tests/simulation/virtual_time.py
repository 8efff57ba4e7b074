"""Replaces the clocks of ``time`` by the clock of the running simulation.

:func:`install` must be called before any module of conch is imported, because modules bind ``monotonic`` at import.
Without a running simulation, the clocks are the machine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: The machine's monotonic clock (s), for budgets of real time.
real_monotonic: Callable[[], float] = time.monotonic
_real_monotonic_ns = time.monotonic_ns
_real_sleep = time.sleep

#: Each reading of the clock takes this long (ns), so that no two readings are equal.
_READING_NS = 1_000


class VirtualClock:
    """A clock (ns) that the simulation advances, and that advances a little with each reading."""

    def __init__(self, start: int) -> None:
        self.now_ns = start

    def advance_to(self, when_ns: int) -> None:
        """Advance the clock to ``when_ns``; it never goes back."""
        if when_ns > self.now_ns:
            self.now_ns = when_ns


_running: VirtualClock | None = None


def use(clock: VirtualClock | None) -> None:
    """Make the clocks of ``time`` show ``clock``, or the machine's time again (None)."""
    global _running
    _running = clock


def _monotonic_ns() -> int:
    if _running is None:
        return _real_monotonic_ns()
    _running.now_ns += _READING_NS
    return _running.now_ns


def _monotonic() -> float:
    return _monotonic_ns() / 1e9


def _sleep(seconds: float) -> None:
    from tests.simulation.threads import block, current_thread

    if current_thread() is None:
        _real_sleep(seconds)
    else:
        block(seconds)


def install() -> None:
    """Replace the clocks of this process permanently."""
    time.monotonic = _monotonic
    time.monotonic_ns = _monotonic_ns
    time.perf_counter = _monotonic
    time.perf_counter_ns = _monotonic_ns
    time.sleep = _sleep
