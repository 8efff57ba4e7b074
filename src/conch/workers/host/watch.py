"""Looks after all workers of a server, so that one that hangs is noticed: one timer, and no frames.

Belongs to ``WorkerProcesses``; on the event loop.  A look reads a few bytes of shared memory for each worker; the
kernel is asked only about those that are silent or load their model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

from conch.workers.host.activity import Activity, activity, children_activity
from conch.workers.host.liveness import Liveness
from conch.workers.host.process import WorkerProcess

#: Time between two looks (s).
INTERVAL: Final = 0.5


class WatchClock:
    """Seconds that the server has been watching: what it slept or was suspended for itself counts for nothing."""

    def __init__(self) -> None:
        self._last: float | None = None
        self.now = 0.0

    def look(self, now: float) -> float:
        """The time of a look at ``now`` (s, of any clock); one that comes late counts as a short one."""
        elapsed = now - self._last if self._last is not None else 0.0
        self._last = now
        self.now += elapsed if elapsed < 2 * INTERVAL else INTERVAL / 4
        return self.now


class WorkerWatch:
    """Looks at ``processes`` from ``start`` to ``stop``; ``read`` tells the activity of a process by its id."""

    def __init__(self, processes: Collection[WorkerProcess], read: Callable[[int], Activity | None] = activity) -> None:
        self._processes = processes
        self._read = read
        self._liveness: WeakKeyDictionary[WorkerProcess, Liveness] = WeakKeyDictionary()
        self._clock = WatchClock()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look, unless that goes on already."""
        if self._timer is None:
            self._timer = self._loop.call_later(INTERVAL, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        now = self._clock.look(self._loop.time())
        self._timer = self._loop.call_later(INTERVAL, self._look)
        for process in [process for process in self._processes if process.alive]:
            known = self._liveness.get(process)
            if known is None:
                known = self._liveness[process] = Liveness(now, process.patience)
            reads = partial(self._read, process.pid), partial(children_activity, process.pid)
            process.heed(known.look(now, process.signs, *reads))
