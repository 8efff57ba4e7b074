"""Dispatches requests of sequences to the instances that hold their slots.

The scheduler also selects the instance. An instance is the worker of a Python model, or one of several threads in a
worker.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import count
from time import monotonic_ns

from conch.core.errors import internal
from conch.core.inference import SEQUENCE_START, InferRequest, InferResponse
from conch.server.execution.dispatch import Dispatcher
from conch.server.execution.starting import WorkerPlacement
from conch.server.execution.worker import SupervisedWorker
from conch.server.schedulers.sequences.scheduler import SequenceDecision, SequenceScheduler
from conch.server.schedulers.sequences.slots import NullRequest
from conch.telemetry.statistics import ModelStatistics
from conch.workers.host.execution import Execution


class SequenceDispatcher(Dispatcher):
    """Dispatcher of a model version with sequence batching."""

    def __init__(self, scheduler: SequenceScheduler, statistics: ModelStatistics) -> None:
        super().__init__(scheduler, statistics)
        self._sequences = scheduler
        scheduler.on_cancelled = self._schedule_dispatch
        #: Workers by instance.
        self._instances: dict[str, SupervisedWorker] = {}
        #: Workers that retire after their last sequence.
        self._leaving: list[SupervisedWorker] = []
        self._numbers = count()
        self._wake_at = 0

    @property
    def sequences(self) -> int:
        """Number of sequences that are active or wait for a slot."""
        return self._sequences.live

    def continues(self, request: InferRequest) -> bool:
        """Whether a request belongs to an active sequence, which the server finishes when it stops."""
        return not request.flags & SEQUENCE_START

    def on_available(self, worker: SupervisedWorker) -> None:
        """Add the instances of a worker that has started or restarted, without sequences."""
        self._lost = None
        if worker in self._workers:
            for _ in range(worker.slots):
                # Unique: a retiring worker may still exist when another starts at its placement.
                key = f"{worker.name}/{next(self._numbers)}"
                self._instances[key] = worker
                self._sequences.add_instance(key, monotonic_ns())
            self._schedule_dispatch()

    def on_died(self, worker: SupervisedWorker) -> None:
        """Fail the sequences of a worker whose process has died; the model's state for them is lost."""
        for key in self._keys(worker):
            del self._instances[key]
            self._sequences.lose(key, internal(f"Stub process '{worker.name}' is not healthy."), monotonic_ns())
        self._schedule_dispatch()

    def retire(self) -> None:
        """Free the slots of idle sequences for waiting sequences, because another version gets the new requests."""
        self._sequences.note_replaced()
        self._schedule_dispatch()

    def keep(self, placements: Collection[WorkerPlacement]) -> None:
        """Retire the workers with a placement not in ``placements`` when their sequences have ended."""
        leaving = [worker for worker in self._workers if worker.placement not in placements]
        for worker in leaving:
            for key in self._keys(worker):
                self._sequences.retire(key)
        self._leaving += [worker for worker in leaving if worker not in self._leaving]
        self._retire_vacant()

    def placements(self) -> list[WorkerPlacement]:
        """Placements of the workers that are not retiring."""
        return [worker.placement for worker in self._workers if worker not in self._leaving]

    async def stop(self, seconds: float | None) -> None:
        """End all workers; by force after ``seconds``, or after their own timeouts if that is None."""
        await super().stop(seconds)
        self._instances.clear()
        # Breaks the reference cycle between the scheduler and this dispatcher.
        self._sequences.on_cancelled = lambda: None

    def on_response_sent(self, request: InferRequest, response: InferResponse) -> None:
        """Count a response, except for a batch row without a request."""
        if not isinstance(request, NullRequest):
            super().on_response_sent(request, response)

    def _schedule_dispatch(self) -> None:
        if not self._asking:
            self._asking = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._asking = False
        while (taken := self._sequences.take(monotonic_ns())).batch:
            self._run(taken)
        self._set_timer(taken.wake_at)
        if self._leaving:
            self._retire_vacant()

    def _run(self, taken: SequenceDecision) -> None:
        worker = self._instances[taken.instance]
        worker.execute(taken.batch, partial(self._ran, taken.instance, worker))

    def _set_timer(self, wake_at: int) -> None:
        """Dispatch again at ``wake_at`` (ns, 0 for never); an earlier timer is kept."""
        if self._timer is not None and self._wake_at <= wake_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_at:
            self._wake_at = wake_at
            self._timer = self._loop.call_later(max(wake_at - monotonic_ns(), 0) / 1e9, self._woken)

    def _woken(self) -> None:
        self._timer = None
        self._dispatch()

    def _ran(self, instance: str, worker: SupervisedWorker, execution: Execution) -> None:
        self._record(worker, execution)
        again = execution.rescheduled
        if not self._sequences.policy.iterative:
            for request in again:
                self._refuse_to_reschedule(request)
            again = ()
        if worker.ready:
            self._sequences.done(instance, monotonic_ns(), again)
            # Not immediate: the responses, with the states of the sequences, are delivered after this call.
            self._schedule_dispatch()

    def _keys(self, worker: SupervisedWorker) -> list[str]:
        return [key for key, instance in self._instances.items() if instance is worker]

    def _retire_vacant(self) -> None:
        for worker in list(self._leaving):
            keys = self._keys(worker)
            if all(self._sequences.vacant(key) for key in keys):
                self._leaving.remove(worker)
                for key in keys:
                    del self._instances[key]
                    self._sequences.remove_instance(key)
                self._workers.remove(worker)
                self._retire(worker)
