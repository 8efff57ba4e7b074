"""Gives waiting requests to free workers.

There is one dispatcher per loaded model version, on the event loop.  The scheduler decides which requests run; the
dispatcher asks it whenever a request arrives or a worker becomes free, and again when a delay has passed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Mapping
from functools import partial
from time import monotonic_ns
from typing import Any

from conch import logs
from conch.errors import ConchError, internal
from conch.inference import InferRequest, InferResponse
from conch.schedulers.batching import Scheduler
from conch.schedulers.ordering import InOrder
from conch.server.execution.starting import WorkerPlacement
from conch.server.execution.worker import SupervisedWorker
from conch.server.runtime_facts import RuntimeFacts, merged
from conch.telemetry.statistics import ModelStatistics
from conch.workers.host.execution import Execution
from conch.workers.host.process import WorkerProcess

LOG = logging.getLogger("conch")

#: How long requests that wait are collected before a worker is told to decode them: many in one frame disturb it
#: less, and those that start sooner need not be told twice.
PREPARE_SECONDS = 0.001

_NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
    "such a flag."
)


class Dispatcher:
    """Feeds the workers of a model version from its scheduler's queue."""

    def __init__(
        self,
        scheduler: Scheduler,
        statistics: ModelStatistics,
        *,
        preserve_ordering: bool = False,
        prepares: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._queue = scheduler.queue
        self._statistics = statistics
        statistics.queue = self._queue
        self._order = InOrder() if preserve_ordering else None
        self._workers: list[SupervisedWorker] = []
        self._retiring: dict[asyncio.Task[None], SupervisedWorker] = {}
        self._free: deque[SupervisedWorker] = deque()  # each as often as it can take a batch now
        self._prepares = prepares
        self._to_prepare: list[InferRequest] = []
        self._turns = 0
        self._loop = asyncio.get_running_loop()
        self._asking = False
        self._timer: asyncio.TimerHandle | None = None
        self._lost: ConchError | None = None  # why nothing can run, as long as that is so

    def add(self, worker: SupervisedWorker) -> None:
        """Feed another worker, which calls :meth:`on_available` when it can run."""
        self._workers.append(worker)

    def placements(self) -> list[WorkerPlacement]:
        """Where the workers are."""
        return [worker.placement for worker in self._workers]

    def keep(self, placements: Collection[WorkerPlacement]) -> None:
        """Retire the workers whose placement is not among ``placements``; each finishes its requests first."""
        retiring = [worker for worker in self._workers if worker.placement not in placements]
        self._workers = [worker for worker in self._workers if worker.placement in placements]
        self._free = deque(worker for worker in self._free if worker.placement in placements)
        for worker in retiring:
            self._retire(worker)

    def _retire(self, worker: SupervisedWorker) -> asyncio.Task[None]:
        """Have a worker end after its requests; the task is done when it has."""
        task = self._loop.create_task(worker.retire())
        self._retiring[task] = worker
        task.add_done_callback(self._retiring.pop)
        return task

    async def finish_retiring(self) -> None:
        """Wait until the models of the workers that retire have finalized; giving up changes nothing for them."""
        if self._retiring:
            await asyncio.wait(list(self._retiring))

    @property
    def ready(self) -> bool:
        """Whether every worker can run a batch, and shows signs of life."""
        return all(worker.responsive for worker in self._workers)

    @property
    def away(self) -> str:
        """Its requests run on this server."""
        return ""

    @property
    def runtime_facts(self) -> RuntimeFacts:
        """What the workers run with, together."""
        return merged(worker.runtime_facts for worker in self._workers)

    @property
    def sequences(self) -> int:
        """How many sequences are under way: none."""
        return 0

    def continues(self, request: InferRequest) -> bool:
        """Whether a request belongs to what is under way, which the server finishes when it stops."""
        return False

    @property
    def processes(self) -> list[WorkerProcess]:
        """The processes of the workers, also of those that finish their last requests."""
        workers = (*self._workers, *self._retiring.values())
        return [worker.process for worker in workers if worker.process is not None]

    def submit(self, request: InferRequest) -> None:
        """Enqueue; raises UNAVAILABLE when the queue is full, INTERNAL when there is no worker and none to be had."""
        if self._lost is not None:
            raise ConchError(self._lost.message, self._lost.code)  # a new one, since it keeps who it was raised to
        self._queue.add(request, monotonic_ns())
        if self._order is not None:
            self._order.admit(request)
        if self._prepares and not self._free:
            if not self._to_prepare:
                self._loop.call_later(PREPARE_SECONDS, self._prepare)
            self._to_prepare.append(request)
        self._schedule_dispatch()

    def on_available(self, worker: SupervisedWorker) -> None:
        """``worker`` has started or restarted and can take as many batches as it has slots."""
        self._lost = None
        if worker in self._workers:
            self._free = deque(one for one in self._free if one is not worker)
            self._free.extend([worker] * worker.slots)
            self._schedule_dispatch()

    def on_prepared(self) -> None:
        """A worker has told the lengths of some requests, on which it may depend which of them run."""
        self._schedule_dispatch()

    def on_progress(self, pid: int, progress: Mapping[str, Any]) -> None:
        """Count what the worker process ``pid`` generates (``{}`` when it has ended)."""
        self._statistics.record_generation(pid, progress)

    def on_died(self, worker: SupervisedWorker) -> None:
        """The process of ``worker`` has died; what waits runs when there is another, or elsewhere."""

    def on_lost(self, worker: SupervisedWorker) -> None:
        """``worker`` could not be restarted; if no other can run either, fail what waits and refuse new requests."""
        if not any(one.ready for one in self._workers):
            self._lost = internal(f"Stub process '{worker.name}' is not healthy.")
            self.fail_waiting(self._lost)

    def fail_waiting(self, error: ConchError) -> None:
        """End every request that still waits with ``error``."""
        for request in self._queue.drain():
            request.fail(error)

    def set_log(self, levels: Mapping[str, Any]) -> None:
        """Tell the models' loggers which levels are wanted."""
        for worker in self._workers:
            worker.set_log(levels)

    def retire(self) -> None:
        """Its sequences end with it."""

    def abandon(self) -> None:
        """End the workers that have requests; the others are left to be stopped."""
        for worker in (*self._workers, *self._retiring.values()):
            worker.abandon()

    async def stop(self, seconds: float | None) -> None:
        """End all workers, by force after ``seconds``, or after their own timeouts."""
        if self._timer is not None:
            self._timer.cancel()
        workers = [*self._workers, *self._retiring.values()]
        await asyncio.gather(*(worker.stop(seconds) for worker in workers))
        # They know this dispatcher: neither should wait for the garbage collector to find both.
        self._workers.clear()
        self._free.clear()

    def _schedule_dispatch(self) -> None:
        # After the callbacks of this round: requests that arrived together can share a batch.
        if not self._asking and self._free and len(self._queue):
            self._asking = True
            self._loop.call_soon(self._dispatch)

    def _prepare(self) -> None:
        """Have a worker decode the requests that arrived within the last millisecond and still wait."""
        waiting = [request for request in self._to_prepare if not request.finished and not request.times.started]
        self._to_prepare = []
        ready = [worker for worker in self._workers if worker.ready]
        if waiting and ready:
            self._turns += 1
            ready[self._turns % len(ready)].prepare(waiting)

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
        """Give ``worker``, which is free, the batch that is to run now; empty if there is none yet."""
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
        """Count an execution."""
        size = sum(request.batch_size for request in execution.requests)
        self._statistics.record_execution(size, *execution.times)
        if logs.current().log_verbose_level > 1:
            ran = (execution.times[0] / 1e6, execution.times[1] / 1e6, execution.times[2] / 1e6)
            text = "%s ran %d requests with a batch of %d in all: input %.3f ms, infer %.3f ms, output %.3f ms"
            logs.verbose(2, text, worker.name, len(execution.requests), size, *ran)
        if execution.work:
            self._statistics.record_work(execution.work)

    def _refuse_to_reschedule(self, request: InferRequest) -> None:
        """Fail a request that its model wants once more, which only the requests of iterative sequences may be."""
        LOG.error("failed to release a request of model '%s': %s", self._statistics.name, _NOT_ITERATIVE)
        request.fail(internal(_NOT_ITERATIVE))

    def on_response_sent(self, request: InferRequest, response: InferResponse) -> None:
        """Count a response that a response sender gave, by its index in its request."""
        now, times = monotonic_ns(), request.times
        self._statistics.record_sent(
            request.responses,
            now - times.started,
            now - times.arrived,
            empty=response.empty,
            failed=response.error is not None,
        )
