"""Dispatchers for models whose instances share resources with other instances (``--rate-limit=execution_count``)."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial
from time import monotonic_ns
from typing import Any

from conch.config.schema import ModelConfig
from conch.server.execution.dispatch import Dispatcher
from conch.server.execution.resources import WorkersLimits
from conch.server.execution.sequences import SequenceDispatcher
from conch.server.execution.starting import WorkerPlacement
from conch.server.execution.worker import SupervisedWorker
from conch.server.schedulers.rate_limiter import InstanceRateLimiter, LimitedInstance
from conch.workers.host.execution import Execution


class LimitsResources(Dispatcher):
    """Base class of rate-limited dispatchers; registers the instances of its workers with ``limiter``."""

    def __init__(self, *arguments: Any, limiter: InstanceRateLimiter, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limiter = limiter
        self._limits = WorkersLimits(limiter, self._granted)

    def reserve(self, config: ModelConfig, placements: Iterable[WorkerPlacement]) -> None:
        """Register the instances at ``placements`` before their workers start; raises as the limiter does."""
        self._limits.reserve(config, placements)

    def give_up(self, placements: Iterable[WorkerPlacement]) -> None:
        """Unregister the instances at ``placements`` because their workers failed to start."""
        self._limits.give_up(placements)

    def add(self, worker: SupervisedWorker) -> None:
        self._limits.assign(worker)
        super().add(worker)

    def on_died(self, worker: SupervisedWorker) -> None:
        """Unstage the instances of the worker, so that other instances or models can run."""
        super().on_died(worker)
        for instance in self._limits.of(worker):
            self._limiter.unstage(instance)
        self._limiter.attempt()
        self._schedule_dispatch()

    async def stop(self, seconds: float | None) -> None:
        await super().stop(seconds)
        self._limits.forget_all()

    def _retire(self, worker: SupervisedWorker) -> asyncio.Task[None]:
        task = super()._retire(worker)
        task.add_done_callback(partial(self._retired, worker))
        return task

    def _retired(self, worker: SupervisedWorker, task: asyncio.Task[None]) -> None:
        self._limits.forget(worker)
        self._schedule_dispatch()

    def _granted(self, instance: LimitedInstance) -> bool:
        """Run a batch on ``instance``, which has its resources; return False if no batch is due."""
        raise NotImplementedError


class LimitedDispatcher(LimitsResources):
    """Acquires resources for each batch, with the free instance that is next in the limiter's order."""

    def __init__(self, *arguments: Any, limiter: InstanceRateLimiter, **options: Any) -> None:
        super().__init__(*arguments, limiter=limiter, **options)
        self._ran_by: dict[int, LimitedInstance] = {}  # by the serial number of the batch's first request
        self._staged: LimitedInstance | None = None

    def on_died(self, worker: SupervisedWorker) -> None:
        if self._staged in self._limits.of(worker):
            self._withdraw()
        super().on_died(worker)

    def fail_waiting(self, error: Any) -> None:
        super().fail_waiting(error)
        self._withdraw()

    def _retired(self, worker: SupervisedWorker, task: asyncio.Task[None]) -> None:
        if self._staged in self._limits.of(worker):
            self._staged = None
        super()._retired(worker, task)

    def _dispatch(self) -> None:
        self._asking = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not len(self._queue):
            self._withdraw()
            return
        self._free = deque(worker for worker in self._free if worker.ready)
        idle = [
            instance
            for worker in dict.fromkeys(self._free)
            for instance in self._limits.of(worker)
            if not instance.running
        ]
        if not idle:
            self._withdraw()
            return
        first = min(idle, key=lambda instance: instance.rank)
        if first is not self._staged:
            self._withdraw()
            self._staged = first
            self._limiter.stage(first)
        self._limiter.attempt()

    def _withdraw(self) -> None:
        if self._staged is not None:
            self._limiter.unstage(self._staged)
            self._staged = None

    def _granted(self, instance: LimitedInstance) -> bool:
        self._staged = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        worker = next((worker for worker in self._free if instance in self._limits.of(worker) and worker.ready), None)
        if worker is None:
            self._schedule_dispatch()  # with an instance that can run
            return False
        batch = self._run_on(worker)
        if not batch:
            return False
        self._ran_by[batch[0].serial] = instance
        self._schedule_dispatch()
        return True

    def _done(self, worker: SupervisedWorker, execution: Execution) -> None:
        instance = self._ran_by.pop(execution.requests[0].serial)
        self._limiter.release(instance)
        super()._done(worker, execution)
        self._limiter.attempt()


class LimitedGenerationDispatcher(LimitsResources):
    """Acquires the resources of an engine for its first request and releases them after its last one.

    While an instance of another model waits for one of them, the engine gets no further requests; otherwise it might
    never release them.
    """

    def __init__(self, *arguments: Any, limiter: InstanceRateLimiter, **options: Any) -> None:
        super().__init__(*arguments, limiter=limiter, **options)
        self._running: Counter[SupervisedWorker] = Counter()

    def _dispatch(self) -> None:
        self._asking = False
        engines = {worker: self._limits.of(worker)[0] for worker in self._workers}
        for worker in list(self._free):  # repeated for each free slot
            if not worker.ready or not len(self._queue):
                continue
            instance = engines[worker]
            if not instance.running:
                self._limiter.stage(instance)
            elif not self._limiter.contended(instance, engines.values()):
                self._running[worker] += len(self._run_on(worker))
        self._limiter.attempt()
        self._withdraw_if_empty()

    def _withdraw_if_empty(self) -> None:
        """Unstage all engines if no request waits, so that they do not block other instances."""
        if not len(self._queue):
            for worker in self._workers:
                self._limiter.unstage(self._limits.of(worker)[0])

    def _granted(self, instance: LimitedInstance) -> bool:
        worker = next(
            (worker for worker in self._free if self._limits.of(worker)[0] is instance and worker.ready), None
        )
        if worker is None or not self._run_on(worker):
            return False
        self._running[worker] += 1
        self._withdraw_if_empty()
        self._schedule_dispatch()
        return True

    def _done(self, worker: SupervisedWorker, execution: Execution) -> None:
        self._running[worker] -= 1
        if not self._running[worker]:
            del self._running[worker]
            for instance in self._limits.of(worker)[:1]:
                self._limiter.release(instance)
        super()._done(worker, execution)
        self._limiter.attempt()


class LimitedSequenceDispatcher(LimitsResources, SequenceDispatcher):
    """Acquires resources for each batch of sequences; stages every idle instance that has waiting requests."""

    def __init__(self, *arguments: Any, limiter: InstanceRateLimiter, **options: Any) -> None:
        super().__init__(*arguments, limiter=limiter, **options)
        self._limited: dict[str, LimitedInstance] = {}  # by the scheduler's instance key

    def on_available(self, worker: SupervisedWorker) -> None:
        super().on_available(worker)
        self._limited.update(zip(self._keys(worker), self._limits.of(worker), strict=False))

    def on_died(self, worker: SupervisedWorker) -> None:
        for instance in self._limits.of(worker):
            self._limiter.release(instance)
        super().on_died(worker)

    def _dispatch(self) -> None:
        self._asking = False
        self._set_timer(self._sequences.take(monotonic_ns(), among=()).wake_at)
        if self._leaving:
            self._retire_vacant()
        self._limited = {key: instance for key, instance in self._limited.items() if key in self._instances}
        eager = set(self._sequences.eager())
        for key, instance in self._limited.items():
            if key in eager and not instance.running:
                self._limiter.stage(instance)
            else:
                self._limiter.unstage(instance)
        self._limiter.attempt()

    def _granted(self, instance: LimitedInstance) -> bool:
        key = next(
            (key for key, limited in self._limited.items() if limited is instance and key in self._instances), ""
        )
        taken = self._sequences.take(monotonic_ns(), among=(key,))
        if taken.batch:
            self._run(taken)
        elif taken.wake_at:
            self._set_timer(taken.wake_at)
        return bool(taken.batch)

    def _ran(self, instance: str, worker: SupervisedWorker, execution: Execution) -> None:
        if instance in self._limited:
            self._limiter.release(self._limited[instance])
        super()._ran(instance, worker, execution)
        self._schedule_dispatch()
