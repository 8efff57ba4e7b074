"""Dispatches waiting requests to free workers.

Each loaded model version has a dispatcher, on the event loop. The scheduler decides which requests run; the dispatcher
calls it when a request arrives, when a worker becomes free, and when a queue delay has passed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Mapping
from functools import partial
from time import monotonic_ns
from typing import Any

from conch.core.errors import ConchError, internal, unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.machine import logs
from conch.server.execution.executor import STOPPING, Executor
from conch.server.execution.starting import WorkerPlacement
from conch.server.execution.worker import SupervisedWorker
from conch.server.runtime_facts import RuntimeFacts, merged
from conch.server.schedulers.batching import Scheduler
from conch.telemetry.statistics import ModelStatistics
from conch.workers.host.execution import Execution
from conch.workers.host.process import WorkerProcess

LOG = logging.getLogger("conch")

#: Time for which waiting requests are collected before a worker decodes them (s): one frame with many requests
#: interrupts the worker less, and requests that start sooner are sent only once.
PREPARE_SECONDS = 0.001

_NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
    "such a flag."
)


class Dispatcher(Executor):
    """Dispatches the requests in a scheduler's queue to the workers of a model version."""

    def __init__(
        self,
        scheduler: Scheduler,
        statistics: ModelStatistics,
        *,
        prepares: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._queue = scheduler.queue
        self._statistics = statistics
        statistics.queue = self._queue
        self._workers: list[SupervisedWorker] = []
        self._retiring: dict[asyncio.Task[None], SupervisedWorker] = {}
        self._free: deque[SupervisedWorker] = deque()  # repeated for each free slot
        self._prepares = prepares
        self._to_prepare: list[InferRequest] = []
        self._rotation = 0
        self._loop = asyncio.get_running_loop()
        self._asking = False
        self._timer: asyncio.TimerHandle | None = None
        self._lost: ConchError | None = None  # set while no worker can run requests

    def add(self, worker: SupervisedWorker) -> None:
        """Add a worker, which calls :meth:`on_available` when it can run batches."""
        self._workers.append(worker)

    def placements(self) -> list[WorkerPlacement]:
        """Return the placements of the workers."""
        return [worker.placement for worker in self._workers]

    def keep(self, placements: Collection[WorkerPlacement]) -> None:
        """Retire the workers with a placement not in ``placements``; each finishes its requests first."""
        retiring = [worker for worker in self._workers if worker.placement not in placements]
        self._workers = [worker for worker in self._workers if worker.placement in placements]
        self._free = deque(worker for worker in self._free if worker.placement in placements)
        for worker in retiring:
            self._retire(worker)

    def _retire(self, worker: SupervisedWorker) -> asyncio.Task[None]:
        """End a worker after its in-flight requests; the returned task ends with the worker."""
        task = self._loop.create_task(worker.retire())
        self._retiring[task] = worker
        task.add_done_callback(self._retiring.pop)
        return task

    async def finish_retiring(self) -> None:
        """Wait until the retiring workers have ended; cancelling the wait does not affect them."""
        if self._retiring:
            await asyncio.wait(list(self._retiring))

    @property
    def ready(self) -> bool:
        """Whether all workers are ready and responsive."""
        return all(worker.responsive for worker in self._workers)

    @property
    def runtime_facts(self) -> RuntimeFacts:
        """The merged runtime facts of the workers."""
        return merged(worker.runtime_facts for worker in self._workers)

    @property
    def processes(self) -> list[WorkerProcess]:
        """The processes of the workers, including retiring ones."""
        workers = (*self._workers, *self._retiring.values())
        return [worker.process for worker in workers if worker.process is not None]

    def submit(self, request: InferRequest) -> None:
        """Enqueue a request; raises UNAVAILABLE if the queue is full, INTERNAL if no worker can be started."""
        if self._lost is not None:
            raise ConchError(self._lost.message, self._lost.code)  # a copy, because its traceback references the caller
        self._queue.add(request, monotonic_ns())
        if self._prepares and not self._free:
            if not self._to_prepare:
                self._loop.call_later(PREPARE_SECONDS, self._prepare)
            self._to_prepare.append(request)
        self._schedule_dispatch()

    def on_available(self, worker: SupervisedWorker) -> None:
        """Record that ``worker`` has started or restarted and can run as many batches as it has slots."""
        self._lost = None
        if worker in self._workers:
            self._free = deque(free_worker for free_worker in self._free if free_worker is not worker)
            self._free.extend([worker] * worker.slots)
            self._schedule_dispatch()

    def on_prepared(self) -> None:
        """Dispatch again, because a worker has reported lengths of requests, which may change the next batch."""
        self._schedule_dispatch()

    def on_progress(self, pid: int, progress: Mapping[str, Any]) -> None:
        """Record the generation progress of the worker process ``pid``; empty when it has ended."""
        self._statistics.record_generation(pid, progress)

    def on_died(self, worker: SupervisedWorker) -> None:
        """Do nothing: waiting requests run on other workers, or after the restart."""

    def on_lost(self, worker: SupervisedWorker) -> None:
        """If no other worker is ready, fail waiting requests and refuse new ones: ``worker`` could not be restarted."""
        if not any(worker.ready for worker in self._workers):
            self._lost = internal(f"Stub process '{worker.name}' is not healthy.")
            self.fail_waiting(self._lost)

    def fail_waiting(self, error: ConchError) -> None:
        """Fail all waiting requests with ``error``."""
        for request in self._queue.drain():
            request.fail(error)

    def abandon(self) -> None:
        """Fail waiting requests and kill the workers with in-flight requests; :meth:`stop` ends the others."""
        self.fail_waiting(unavailable(STOPPING))
        for worker in (*self._workers, *self._retiring.values()):
            worker.abandon()

    async def stop(self, seconds: float | None) -> None:
        """Fail waiting requests and end all workers; by force after ``seconds``, or after their timeouts if None."""
        self.fail_waiting(unavailable(STOPPING))
        if self._timer is not None:
            self._timer.cancel()
        workers = [*self._workers, *self._retiring.values()]
        await asyncio.gather(*(worker.stop(seconds) for worker in workers))
        # Breaks the reference cycles between the workers and this dispatcher.
        self._workers.clear()
        self._free.clear()

    def _schedule_dispatch(self) -> None:
        # Deferred until the current callbacks have run, so that requests that arrived together can share a batch.
        if not self._asking and self._free and len(self._queue):
            self._asking = True
            self._loop.call_soon(self._dispatch)

    def _prepare(self) -> None:
        """Send the collected requests that still wait to a worker for decoding."""
        waiting = [request for request in self._to_prepare if not request.finished and not request.times.started]
        self._to_prepare = []
        ready = [worker for worker in self._workers if worker.ready]
        if waiting and ready:
            self._rotation += 1
            ready[self._rotation % len(ready)].prepare(waiting)

    def _dispatch(self) -> None:
        self._asking = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._free and len(self._queue):
            worker = self._free[0]
            if not worker.ready:
                self._free.popleft()
                continue
            if not self._run_on(worker):
                break

    def _run_on(self, worker: SupervisedWorker) -> list[InferRequest]:
        """Run the next batch on ``worker``, which is free; return it, empty if none is due."""
        taken = self._scheduler.take(monotonic_ns())
        if taken.batch:
            self._free.remove(worker)
            worker.execute(taken.batch, partial(self._done, worker))
        elif taken.wake_at:
            self._timer = self._loop.call_later(max(taken.wake_at - monotonic_ns(), 0) / 1e9, self._dispatch)
        return taken.batch

    def _done(self, worker: SupervisedWorker, execution: Execution) -> None:
        self._record(worker, execution)
        for request in execution.rescheduled:
            self._refuse_to_reschedule(request)
        if worker.ready and worker in self._workers:
            self._free.append(worker)
            if len(self._queue):
                self._dispatch()

    def _record(self, worker: SupervisedWorker, execution: Execution) -> None:
        """Record an execution in the statistics and the verbose log."""
        size = sum(request.batch_size for request in execution.requests)
        self._statistics.record_execution(size, *execution.times)
        if logs.current().log_verbose_level > 1:
            ran = (execution.times[0] / 1e6, execution.times[1] / 1e6, execution.times[2] / 1e6)
            text = "%s ran %d requests with a batch of %d in all: input %.3f ms, infer %.3f ms, output %.3f ms"
            logs.verbose(2, text, worker.name, len(execution.requests), size, *ran)
        if execution.work:
            self._statistics.record_work(execution.work)

    def _refuse_to_reschedule(self, request: InferRequest) -> None:
        """Fail a request that its model has rescheduled; only requests of iterative sequences can be rescheduled."""
        LOG.error("failed to release a request of model '%s': %s", self._statistics.name, _NOT_ITERATIVE)
        request.fail(internal(_NOT_ITERATIVE))

    def on_response_sent(self, request: InferRequest, response: InferResponse) -> None:
        """Record a response of a response sender, by its index in the request."""
        now, times = monotonic_ns(), request.times
        self._statistics.record_sent(
            request.responses,
            now - times.started,
            now - times.arrived,
            empty=response.empty,
            failed=response.error is not None,
        )
