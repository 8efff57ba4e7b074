"""All worker processes of a server, so that none outlives it.

Belongs to the server; on its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakSet

from conch.errors import unavailable
from conch.workers.host.process import WorkerProcess


class WorkerProcesses:
    """Makes workers, and ends those that are left when everybody who owned one is gone."""

    def __init__(self, new: Callable[[str], WorkerProcess] = WorkerProcess) -> None:
        self._new = new
        self._made: WeakSet[WorkerProcess] = WeakSet()
        self._closed = False

    def new(self, name: str) -> WorkerProcess:
        """A worker that has not been started.  Raises UNAVAILABLE after :meth:`close`."""
        if self._closed:
            raise unavailable(f"worker '{name}' is not started: the server is stopping")
        process = self._new(name)
        self._made.add(process)
        return process

    async def close(self) -> None:
        """Kill the workers that still run, such as those of a load that was given up; return when they have ended."""
        self._closed = True
        left = [process for process in self._made if process.alive]
        for process in left:
            process.kill()
        await asyncio.gather(*(process.ended() for process in left))
