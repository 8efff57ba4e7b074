"""Brings the requests that wait and the instances that are free together.

One dispatcher per loaded model version, on the event loop.  The scheduler decides what runs; this
class asks it whenever something has changed, and once more when it wanted to wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Mapping
from functools import partial
from time import monotonic_ns
from typing import Any

from conch.errors import ConchError, internal
from conch.inference import InferRequest, InferResponse
from conch.schedulers.batching import Scheduler
from conch.schedulers.ordering import InOrder
from conch.server.starting import Placement
from conch.server.worker import SupervisedWorker
from conch.telemetry.statistics import ModelStatistics
from conch.workers.host.execution import Execution

#: How long requests that wait are collected before a worker is told to decode them: many in one frame disturb it
#: less, and those that start sooner need not be told twice.
PREPARE_SECONDS = 0.001


class Dispatcher:
    """Feeds the instances of a model version from its scheduler's queue."""

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
        self._instances: list[SupervisedWorker] = []
        self._leaving: dict[asyncio.Task[None], SupervisedWorker] = {}
        self._free: deque[SupervisedWorker] = deque()  # each as often as it can take a batch now
        self._prepares = prepares
        self._to_prepare: list[InferRequest] = []
        self._turns = 0
        self._loop = asyncio.get_running_loop()
        self._asking = False
        self._timer: asyncio.TimerHandle | None = None
        self._lost: ConchError | None = None  # why nothing can run, as long as that is so

    def add(self, instance: SupervisedWorker) -> None:
        """Feed one instance more; it announces itself by :meth:`available`."""
        self._instances.append(instance)

    def placements(self) -> list[Placement]:
        """Where the instances are."""
        return [instance.place for instance in self._instances]

    def keep(self, places: Collection[Placement]) -> None:
        """Let the instances that are anywhere else go, each after what it is doing."""
        leaving = [instance for instance in self._instances if instance.place not in places]
        self._instances = [instance for instance in self._instances if instance.place in places]
        self._free = deque(instance for instance in self._free if instance.place in places)
        for instance in leaving:
            task = self._loop.create_task(instance.leave())
            self._leaving[task] = instance
            task.add_done_callback(self._leaving.pop)

    @property
    def ready(self) -> bool:
        """Whether every instance can run."""
        return all(instance.ready for instance in self._instances)

    def submit(self, request: InferRequest) -> None:
        """Enqueue; raises UNAVAILABLE when the queue is full, INTERNAL when there is no worker and none to be had."""
        if self._lost is not None:
            raise self._lost
        self._queue.add(request, monotonic_ns())
        if self._order is not None:
            self._order.admit(request)
        if self._prepares and not self._free:
            if not self._to_prepare:
                self._loop.call_later(PREPARE_SECONDS, self._prepare)
            self._to_prepare.append(request)
        self._ask_soon()

    def available(self, instance: SupervisedWorker) -> None:
        """An instance has a new worker, which can take as many batches as it has slots."""
        self._lost = None
        if instance in self._instances:
            self._free = deque(one for one in self._free if one is not instance)
            self._free.extend([instance] * instance.slots)
            self._ask_soon()

    def prepared(self) -> None:
        """The lengths of some requests are known now, on which it may depend what runs."""
        self._ask_soon()

    def generated(self, worker: int, load: Mapping[str, Any]) -> None:
        """What a worker has under way and has done since it said so last."""
        self._statistics.record_generation(worker, load)

    def lost(self, instance: SupervisedWorker) -> None:
        """An instance will not be back soon; without any other, nothing waits in vain."""
        if not any(one.ready for one in self._instances):
            self._lost = internal(f"Stub process '{instance.name}' is not healthy.")
            self.fail_waiting(self._lost)

    def fail_waiting(self, error: ConchError) -> None:
        """End whatever still waits."""
        for request in self._queue.drain():
            request.fail(error)

    def set_log(self, levels: Mapping[str, Any]) -> None:
        """Tell the models' loggers which levels are wanted."""
        for instance in self._instances:
            instance.set_log(levels)

    async def stop(self, seconds: float) -> None:
        """End the instances, whose workers are killed after ``seconds``."""
        if self._timer is not None:
            self._timer.cancel()
        instances = [*self._instances, *self._leaving.values()]
        await asyncio.gather(*(instance.stop(seconds) for instance in instances))

    def _ask_soon(self) -> None:
        # After the callbacks of this round: requests that arrived together can share a batch.
        if not self._asking and self._free and len(self._queue):
            self._asking = True
            self._loop.call_soon(self._ask)

    def _prepare(self) -> None:
        """Have a worker decode what arrived a moment ago and still waits."""
        waiting = [request for request in self._to_prepare if not request.finished and not request.times.started]
        self._to_prepare = []
        ready = [instance for instance in self._instances if instance.ready]
        if waiting and ready:
            self._turns += 1
            ready[self._turns % len(ready)].prepare(waiting)

    def _ask(self) -> None:
        self._asking = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._free and len(self._queue):
            instance = self._free[0]
            if not instance.ready:
                self._free.popleft()
                continue
            taken = self._scheduler.take(monotonic_ns())
            if not taken.batch:
                if taken.wake_at:
                    self._timer = self._loop.call_later(max(taken.wake_at - monotonic_ns(), 0) / 1e9, self._ask)
                break
            self._free.popleft()
            instance.execute(taken.batch, partial(self._done, instance))

    def _done(self, instance: SupervisedWorker, execution: Execution) -> None:
        size = sum(request.batch_size for request in execution.requests)
        self._statistics.record_execution(size, *execution.times)
        if execution.work:
            self._statistics.record_work(execution.work)
        if instance.ready and instance in self._instances:
            self._free.append(instance)
            if len(self._queue):
                self._ask()

    def sent(self, request: InferRequest, response: InferResponse) -> None:
        """A response sender gave a response: count it by its index."""
        infer = monotonic_ns() - request.times.started
        if response.empty:
            self._statistics.record_empty_response(request.responses, infer)
        else:
            self._statistics.record_response(request.responses, infer, 0, failed=response.error is not None)
        if not request.responses:
            self._statistics.record_first_response(monotonic_ns() - request.times.arrived)
