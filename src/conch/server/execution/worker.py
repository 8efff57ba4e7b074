"""Restarts a worker when it dies. The worker runs one instance of a Python model, or all instances on a device.

Owned by the dispatcher that assigns batches to it; runs on the event loop and uses its clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from conch.core.errors import ConchError
from conch.core.inference import InferRequest, InferResponse
from conch.server.execution.starting import WorkerPlacement
from conch.server.runtime_facts import RuntimeFacts
from conch.telemetry.statistics import RestartReason
from conch.workers.host.execution import Execution
from conch.workers.host.liveness import not_ended
from conch.workers.host.process import WorkerProcess

LOG = logging.getLogger("conch")

#: Seconds before the first, second, third … attempt to restart a worker; the last one repeats.
BACK_OFF = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
#: A worker that dies after more than this time is restarted at once (s).
HEALTHY_SECONDS = 10.0


class RestartBackOff:
    """Delay before the next attempt to restart a worker; it grows until a worker has run for ``HEALTHY_SECONDS``."""

    def __init__(self) -> None:
        self._attempts = 0
        self._started = 0.0

    def started(self, now: float) -> None:
        """Record that a worker has started at ``now`` (s)."""
        self._started = now

    def died(self, now: float) -> None:
        """Record that the worker has died at ``now`` (s)."""
        if now - self._started > HEALTHY_SECONDS:
            self._attempts = 0

    def next_delay(self) -> float:
        """The delay before a new attempt (s); counts the attempt."""
        delay = BACK_OFF[min(self._attempts, len(BACK_OFF) - 1)]
        self._attempts += 1
        return delay


class WorkerOwner(Protocol):
    """The owner of workers, which assigns batches to them; see :class:`conch.server.execution.dispatch.Dispatcher`."""

    #: The paths of the LoRA adapters that clients have loaded, by name; new workers get them.
    adapters: dict[str, str]

    def on_available(self, worker: SupervisedWorker) -> None:
        """Called when ``worker`` has started or restarted."""

    def on_died(self, worker: SupervisedWorker, reason: RestartReason) -> None:
        """Called when the process of ``worker`` has died for ``reason``; it is restarted later."""

    def on_lost(self, worker: SupervisedWorker) -> None:
        """Called when an attempt to restart ``worker`` has failed."""

    def on_response_sent(self, request: InferRequest, response: InferResponse) -> None:
        """Called for each response of a response sender."""

    def on_prepared(self) -> None:
        """Called when a worker has reported the lengths of some requests."""

    def on_progress(self, pid: int, progress: Mapping[str, Any]) -> None:
        """Called when process ``pid`` reports its generation load, or has ended (no entries)."""


class SupervisedWorker:
    """The worker at ``placement``; ``launch`` starts its process and initializes the model, or raises."""

    def __init__(
        self,
        placement: WorkerPlacement,
        launch: Callable[[WorkerPlacement], Awaitable[WorkerProcess]],
        owner: WorkerOwner,
    ) -> None:
        self.placement = placement
        self.name = placement.name
        self._launch = launch
        self._owner = owner
        self._process: WorkerProcess | None = None
        self._restart: asyncio.Task[None] | None = None
        self._stopped = False
        self._back_off = RestartBackOff()
        self._loop = asyncio.get_running_loop()

    @property
    def ready(self) -> bool:
        """Whether the process runs and its model is initialized."""
        return self._process is not None and self._process.alive

    @property
    def responsive(self) -> bool:
        """Whether it is ready and not stalled, and its model does not report that it is not ready."""
        process = self._process
        return process is not None and process.alive and process.verdict.responsive and process.calls.model_ready

    @property
    def slots(self) -> int:
        """Number of batches that it can run concurrently."""
        return (self._process.slots if self._process is not None else 0) or self.placement.count

    @property
    def runtime_facts(self) -> RuntimeFacts:
        """Runtime facts of its model; empty while it restarts."""
        return self._process.runtime_facts if self._process is not None else {}

    @property
    def process(self) -> WorkerProcess | None:
        """The process; None while it restarts."""
        return self._process

    def adopt(self, process: WorkerProcess) -> None:
        """Use a process with an initialized model."""
        self._process = process
        self._back_off.started(self._loop.time())
        process.on_exit = self._exited
        process.on_response_sent = self._owner.on_response_sent
        process.on_prepared = self._owner.on_prepared
        process.on_progress = partial(self._owner.on_progress, process.pid)
        for name, path in self._owner.adapters.items():
            process.register_adapter(name, path)
        if process.alive:
            self._owner.on_available(self)
        else:
            self._exited(process)

    def execute(self, requests: Sequence[InferRequest], on_done: Callable[[Execution], None]) -> None:
        """Run a batch; call only while :attr:`ready`."""
        assert self._process is not None
        self._process.execute(requests, on_done)

    def prepare(self, requests: Sequence[InferRequest]) -> None:
        """Let the worker decode waiting requests."""
        if self._process is not None:
            self._process.prepare(requests)

    async def retire(self) -> None:
        """End after its in-flight requests; it is not restarted if it dies first."""
        self._stopped = True
        if self._process is not None:
            await self._process.finish()
        await self.stop()

    def abandon(self) -> None:
        """Kill the process if it has in-flight requests, which then fail; it is not restarted."""
        self._stopped = True
        if self._process is not None and not self._process.idle:
            self._process.kill_for(not_ended(0.0, idle=False))

    async def stop(self, seconds: float | None = None) -> None:
        """Finalize the model and end the process; by force after ``seconds``, or after its timeouts if that is None."""
        self._stopped = True
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        if self._process is not None:
            await self._process.stop(seconds)

    def _exited(self, process: WorkerProcess) -> None:
        self._process = None
        self._owner.on_progress(process.pid, {})
        if self._stopped:
            return
        end = process.end
        LOG.error("worker of '%s' (pid %d) %s; starting another", self.name, process.pid, end.text)
        self._back_off.died(self._loop.time())
        self._owner.on_died(self, end.reason)
        self._restart = self._loop.create_task(self._restart_until_ready())

    async def _restart_until_ready(self) -> None:
        while True:
            await asyncio.sleep(self._back_off.next_delay())
            try:
                process = await self._launch(self.placement)
            except Exception as error:
                bug = not isinstance(error, ConchError | OSError)
                reason = error.status if isinstance(error, ConchError) else error
                LOG.error("worker of '%s' could not be started again: %s", self.name, reason, exc_info=bug)
                self._owner.on_lost(self)
                continue
            self._restart = None
            self.adopt(process)
            return
