"""An instance of a model: a worker that is started again when it dies.

Runs on the event loop.  The dispatcher hears of it through ``on_available`` and gives it batches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from conch.errors import ConchError
from conch.inference import InferRequest
from conch.workers.process import Execution, WorkerProcess

LOG = logging.getLogger("conch")

#: Waiting times before the second, third … attempt to start a worker again (s); the last one repeats.
BACK_OFF = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Instance:
    """One instance, from its load to its end.

    ``launch`` starts and initializes a worker, or raises.  ``on_available`` is called whenever the
    instance is free to take a batch, ``on_lost`` when a worker could not be replaced at once.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[[], Awaitable[WorkerProcess]],
        on_available: Callable[[Instance], None],
        on_lost: Callable[[Instance], None],
    ) -> None:
        self.name = name
        self.restarts = 0
        self._launch = launch
        self._on_available = on_available
        self._on_lost = on_lost
        self._worker: WorkerProcess | None = None
        self._restart: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def ready(self) -> bool:
        """Whether the worker is there and its model initialized."""
        return self._worker is not None and self._worker.alive

    def adopt(self, worker: WorkerProcess) -> None:
        """Take over an initialized worker."""
        self._worker = worker
        worker.on_exit = self._exited
        if worker.alive:
            self._on_available(self)
        else:
            self._exited(worker)

    def execute(self, requests: Sequence[InferRequest], on_done: Callable[[Execution], None]) -> None:
        """Run a batch; call only while :attr:`ready`."""
        assert self._worker is not None
        self._worker.execute(requests, on_done)

    def set_log(self, levels: Mapping[str, Any]) -> None:
        """Tell the model's logger which levels are wanted."""
        if self._worker is not None:
            self._worker.set_log(dict(levels))

    async def stop(self) -> None:
        """Finalize the model and end the worker."""
        self._stopped = True
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        if self._worker is not None:
            await self._worker.stop()

    def _exited(self, worker: WorkerProcess) -> None:
        self._worker = None
        if self._stopped:
            return
        LOG.error(
            "worker of '%s' (pid %d) died with status %s; starting another", self.name, worker.pid, worker.exit_status
        )
        self._restart = asyncio.get_running_loop().create_task(self._start_again())

    async def _start_again(self) -> None:
        attempt = 0
        while True:
            await asyncio.sleep(BACK_OFF[min(attempt, len(BACK_OFF) - 1)])
            attempt += 1
            try:
                worker = await self._launch()
            except ConchError as error:
                LOG.error("worker of '%s' could not be started again: %s", self.name, error.status)
                self._on_lost(self)
                continue
            self.restarts += 1
            self._restart = None
            self.adopt(worker)
            return
