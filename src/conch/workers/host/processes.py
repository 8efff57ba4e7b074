"""All worker processes of a server: made here, watched, and ended, so that none outlives it.

Belongs to the server; on its event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from weakref import WeakSet

from conch.errors import unavailable
from conch.telemetry.custom import CustomMetrics
from conch.workers.host.guard import Guard
from conch.workers.host.liveness import DEFAULT_PATIENCE, Cause, Patience
from conch.workers.host.process import WorkerProcess
from conch.workers.host.spawn import Spawn, spawn, spawn_at_terminal
from conch.workers.host.watch import WorkerWatch


class WorkerProcesses:
    """Makes workers, has them watched, and ends those that are left when everybody who owned one is gone.

    ``kills`` counts those that the server killed, by model and cause; ``metrics`` are those of models.
    """

    def __init__(
        self,
        new: Callable[[str, Spawn], WorkerProcess] = WorkerProcess,
        patience: Patience = DEFAULT_PATIENCE,
        metrics: CustomMetrics | None = None,
    ) -> None:
        self._new = new
        self._patience = patience
        self._metrics = metrics or CustomMetrics({})
        self._made: WeakSet[WorkerProcess] = WeakSet()
        self._watched: WeakSet[WorkerProcess] = WeakSet()
        self._watch = WorkerWatch(self._watched)
        self._closed = False
        self.kills: Counter[tuple[str, Cause]] = Counter()
        self._guard = Guard()

    def new(self, name: str, spawn: Spawn = spawn, *, debugged: bool = False) -> WorkerProcess:
        """A worker that ``spawn`` is going to start.  Raises UNAVAILABLE after :meth:`close`.

        One that is ``debugged`` has the server's terminal.  It is not watched, since a debugger may hold it for any
        time, and not guarded, since it is in the server's process group.
        """
        if self._closed:
            raise unavailable(f"worker '{name}' is not started: the server is stopping")
        process = self._new(name, spawn_at_terminal if debugged else self._guard.watched(spawn))
        process.patience = self._patience
        process.on_kill = self._count
        process.calls.show_metrics(self._metrics)
        self._made.add(process)
        if not debugged:
            self._watched.add(process)
            self._watch.start()
        return process

    @property
    def pids(self) -> list[int]:
        """The ids of the workers that run."""
        return [process.pid for process in self._made if process.alive]

    async def close(self) -> None:
        """Kill the workers that still run, such as those of a load that was given up; return when they have ended."""
        self._closed = True
        left = [process for process in self._made if process.alive]
        for process in left:
            process.kill()
        await asyncio.gather(*(process.ended() for process in left))
        await self._guard.close()
        self._watch.stop()

    def _count(self, process: WorkerProcess, cause: Cause) -> None:
        self.kills[process.model or process.name, cause] += 1
