"""A model's instance, or its instances on one device: a worker that is started again when it dies.

Runs on the event loop; belongs to the dispatcher that gives it batches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, Protocol

from conch.errors import ConchError
from conch.inference import InferRequest, InferResponse
from conch.server.starting import Placement
from conch.workers.host.execution import Execution
from conch.workers.host.process import STOP_SECONDS, WorkerProcess

LOG = logging.getLogger("conch")

#: Waiting times before the second, third … attempt to start a worker again (s); the last one repeats.
BACK_OFF = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
#: A worker that has lived for so long (s) is started again at once when it dies.
HEALTHY_SECONDS = 10.0


class WorkerOwner(Protocol):
    """Who gives batches to an instance."""

    def available(self, instance: SupervisedWorker) -> None:
        """The instance can take a batch now."""

    def lost(self, instance: SupervisedWorker) -> None:
        """The instance has no worker, and one could not be started."""

    def sent(self, request: InferRequest, response: InferResponse) -> None:
        """A response sender gave a response."""

    def prepared(self) -> None:
        """A worker has told how long some requests are."""

    def generated(self, worker: int, load: Mapping[str, Any]) -> None:
        """A worker has told what it generates."""


class SupervisedWorker:
    """One instance at its ``place``; ``launch`` starts and initializes a worker there, or raises."""

    def __init__(
        self, place: Placement, launch: Callable[[Placement], Awaitable[WorkerProcess]], owner: WorkerOwner
    ) -> None:
        self.place = place
        self.name = place.name
        self._launch = launch
        self._owner = owner
        self._worker: WorkerProcess | None = None
        self._restart: asyncio.Task[None] | None = None
        self._stopped = False
        self._attempts = 0
        self._started = 0.0

    @property
    def ready(self) -> bool:
        """Whether the worker is there and its model initialized."""
        return self._worker is not None and self._worker.alive

    @property
    def slots(self) -> int:
        """How many batches it can have under way."""
        return (self._worker.slots if self._worker is not None else 0) or self.place.count

    def adopt(self, worker: WorkerProcess) -> None:
        """Take over an initialized worker."""
        self._worker = worker
        self._started = monotonic()
        worker.on_exit = self._exited
        worker.on_sent = self._owner.sent
        worker.on_prepared = self._owner.prepared
        worker.on_load = partial(self._owner.generated, worker.pid)
        if worker.alive:
            self._owner.available(self)
        else:
            self._exited(worker)

    def execute(self, requests: Sequence[InferRequest], on_done: Callable[[Execution], None]) -> None:
        """Run a batch; call only while :attr:`ready`."""
        assert self._worker is not None
        self._worker.execute(requests, on_done)

    def prepare(self, requests: Sequence[InferRequest]) -> None:
        """Have the worker decode requests that wait."""
        if self._worker is not None:
            self._worker.prepare(requests)

    def set_log(self, levels: Mapping[str, Any]) -> None:
        """Tell the model's logger which levels are wanted."""
        if self._worker is not None:
            self._worker.set_log(dict(levels))

    async def leave(self) -> None:
        """End after what is under way; a worker that dies meanwhile is not replaced."""
        self._stopped = True
        await self.finish()
        await self.stop(STOP_SECONDS)

    async def finish(self) -> None:
        """Wait until no request is with the worker."""
        if self._worker is not None:
            await self._worker.finish()

    async def stop(self, seconds: float) -> None:
        """Finalize the model and end the worker, by force after ``seconds``."""
        self._stopped = True
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        if self._worker is not None:
            await self._worker.stop(seconds)

    def _exited(self, worker: WorkerProcess) -> None:
        self._worker = None
        self._owner.generated(worker.pid, {})
        if self._stopped:
            return
        LOG.error(
            "worker of '%s' (pid %d) died with status %s; starting another", self.name, worker.pid, worker.exit_status
        )
        if monotonic() - self._started > HEALTHY_SECONDS:
            self._attempts = 0
        self._restart = asyncio.get_running_loop().create_task(self._start_again())

    async def _start_again(self) -> None:
        while True:
            await asyncio.sleep(BACK_OFF[min(self._attempts, len(BACK_OFF) - 1)])
            self._attempts += 1
            try:
                worker = await self._launch(self.place)
            except (ConchError, OSError) as error:
                reason = error.status if isinstance(error, ConchError) else error
                LOG.error("worker of '%s' could not be started again: %s", self.name, reason)
                self._owner.lost(self)
                continue
            self._restart = None
            self.adopt(worker)
            return
