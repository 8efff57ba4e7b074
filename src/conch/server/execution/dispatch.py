"""Dispatches waiting requests to free instances.

Each loaded model version with workers has a dispatcher, on the event loop. The scheduler decides which requests run,
and for sequences on which instance; the dispatcher calls it when a request arrives, when an instance becomes free, and
when a queue delay has passed. With a rate limiter, instances compete with those of other models before they run.
Their resources are registered before their workers start, and belong to their worker until it has retired.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic_ns
from typing import Any

from conch.config.complete import ADAPTERS
from conch.config.schema import InstanceGroup, ModelConfig
from conch.core.errors import ConchError, internal, not_found, unavailable
from conch.core.inference import InferRequest, InferResponse, ignore
from conch.machine import logs
from conch.server.execution.executor import STOPPING, Executor
from conch.server.execution.starting import WorkerPlacement, instances_of
from conch.server.execution.worker import SupervisedWorker
from conch.server.runtime_facts import RuntimeFacts, adapters, merged
from conch.server.schedulers.batching import BatchDecision, Scheduler
from conch.server.schedulers.rate_limiter import GLOBAL, InstanceRateLimiter, LimitedInstance, ResourceKey
from conch.server.schedulers.sequences.scheduler import NullRequest
from conch.telemetry.statistics import ModelStatistics, RestartReason
from conch.workers.host.execution import Execution
from conch.workers.host.process import WorkerProcess

LOG = logging.getLogger("conch")


def is_limited(config: ModelConfig) -> bool:
    """Whether a configuration has rate limiter settings."""
    return any(group.HasField("rate_limiter") for group in config.instance_group)


class InstanceResources:
    """The rate-limited instances of a dispatcher's workers; ``granted`` is called with the instance that may run."""

    def __init__(self, limiter: InstanceRateLimiter, granted: Callable[[LimitedInstance], bool]) -> None:
        self._limiter = limiter
        self._granted = granted
        #: Instances of workers that are about to start.
        self._reserved: dict[WorkerPlacement, list[LimitedInstance]] = {}
        self._instances: dict[SupervisedWorker, list[LimitedInstance]] = {}
        #: Number of running batches; the requests that an engine generates for run side by side.
        self._batches: Counter[LimitedInstance] = Counter()

    def reserve(self, config: ModelConfig, placements: Iterable[WorkerPlacement]) -> None:
        """Register the instances at ``placements``; raises as :meth:`InstanceRateLimiter.register` does."""
        new = {
            placement: [self._made(group, placement) for group in _groups_at(config, placement)]
            for placement in placements
        }
        self._limiter.register([instance for instances in new.values() for instance in instances])
        self._reserved |= new

    def release_reserved(self, placements: Iterable[WorkerPlacement]) -> None:
        """Unregister the instances reserved at ``placements`` after their workers failed to start."""
        self._limiter.unregister(
            [instance for placement in placements for instance in self._reserved.pop(placement, ())]
        )

    def assign(self, worker: SupervisedWorker) -> None:
        """Assign the instances reserved at the placement of ``worker`` to it; called when it has started."""
        self._instances[worker] = self._reserved.pop(worker.placement)

    def of_slots(self, worker: SupervisedWorker) -> Sequence[LimitedInstance]:
        """Return the instance of each slot of a worker; all slots of an engine share one."""
        instances = self._instances[worker]
        return instances if len(instances) == worker.slots else instances[:1] * worker.slots

    def stage(self, competing: Collection[LimitedInstance]) -> None:
        """Let exactly the instances ``competing`` compete with those of other models, and run those that are next."""
        for instance in self._all():
            (self._limiter.stage if instance in competing else self._limiter.unstage)(instance)
        self._limiter.attempt()

    def contended(self, instance: LimitedInstance) -> bool:
        """Whether an instance of another model waits for a resource that ``instance`` uses."""
        return self._limiter.contended(instance, self._all())

    def begin(self, instance: LimitedInstance) -> None:
        """Record that a batch of ``instance`` runs."""
        self._batches[instance] += 1

    def end(self, instance: LimitedInstance) -> None:
        """Record that a batch of ``instance`` has ended; the last one releases its resources."""
        self._batches[instance] -= 1
        if not self._batches[instance]:
            del self._batches[instance]
            self._limiter.release(instance)

    def forget(self, worker: SupervisedWorker) -> None:
        """Unregister the instances of a worker that has retired; others may run now."""
        self._limiter.unregister(self._instances.pop(worker, ()))

    def forget_all(self) -> None:
        """Unregister all instances; called when all workers have ended."""
        self.release_reserved(list(self._reserved))
        for worker in list(self._instances):
            self.forget(worker)

    def _all(self) -> list[LimitedInstance]:
        return [instance for instances in self._instances.values() for instance in instances]

    def _made(self, group: InstanceGroup, placement: WorkerPlacement) -> LimitedInstance:
        instance = LimitedInstance(
            _required_resources(group, placement.device), group.rate_limiter.priority, lambda: False
        )
        instance.run = partial(self._granted, instance)
        return instance


def _groups_at(config: ModelConfig, placement: WorkerPlacement) -> list[InstanceGroup]:
    """The group of each instance of the worker at ``placement``, or a group that differs only in its name."""
    where = placement.kind, placement.device
    placed = [
        (group, instance) for group, instance in instances_of(config) if (instance.kind, instance.device) == where
    ]
    if placement.count == 1:
        return [next(group for group, instance in placed if instance.signature == placement.signature)]
    return [group for group, _ in placed]


def _required_resources(group: InstanceGroup, device: int) -> dict[ResourceKey, int]:
    return {
        ResourceKey(GLOBAL if getattr(resource, "global") else device, resource.name): resource.count
        for resource in group.rate_limiter.resources
    }


#: Time for which waiting requests are collected before a worker decodes them (s): one frame with many requests
#: interrupts the worker less, and requests that start sooner are sent only once.
PREPARE_SECONDS = 0.001

_NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
    "such a flag."
)


@dataclass(eq=False, slots=True)
class Instance:
    """A Python model's worker, a thread of a worker, or a slot of an engine; runs one batch at a time."""

    key: str
    worker: SupervisedWorker
    #: Its resources; None without a rate limiter.
    limited: LimitedInstance | None


class Dispatcher(Executor):
    """Dispatches the requests in a scheduler's queue to the workers of a model version."""

    def __init__(
        self,
        scheduler: Scheduler,
        statistics: ModelStatistics,
        *,
        limiter: InstanceRateLimiter | None = None,
        prepares: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._queue = scheduler.queue
        self._statistics = statistics
        statistics.queue = self._queue
        scheduler.on_cancelled = self._schedule_dispatch
        #: The resources of the instances; None without a rate limiter.
        self.resources = InstanceResources(limiter, self._granted) if limiter is not None else None
        self._workers: list[SupervisedWorker] = []
        #: Workers that retire after their last sequence.
        self._leaving: list[SupervisedWorker] = []
        self._retiring: dict[asyncio.Task[None], SupervisedWorker] = {}
        self._instances: dict[str, Instance] = {}
        self._free: dict[str, Instance] = {}  # the instance that has been free for longest first
        self._numbers = count()
        self._prepares = prepares
        self._to_prepare: list[InferRequest] = []
        self._rotation = 0
        self._loop = asyncio.get_running_loop()
        self._dispatch_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = 0
        self._lost: ConchError | None = None  # set while no worker can run requests
        #: The paths of the LoRA adapters that clients have loaded, by name.
        self.adapters: dict[str, str] = {}
        self._adapting = asyncio.Lock()  # a worker replies to one question at a time

    # Executor interface

    @property
    def ready(self) -> bool:
        """Whether all workers are ready and responsive."""
        return all(worker.responsive for worker in self._workers)

    @property
    def processes(self) -> list[WorkerProcess]:
        """The processes of the workers, including retiring ones."""
        return [worker.process for worker in self._all_workers() if worker.process is not None]

    @property
    def sequences(self) -> int:
        return self._scheduler.live

    def continues(self, request: InferRequest) -> bool:
        return self._scheduler.continues(request)

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

    def retire(self) -> None:
        """Free the slots of idle sequences for waiting sequences, because another version gets the new requests."""
        self._scheduler.note_replaced()
        self._schedule_dispatch()

    def abandon(self) -> None:
        """Fail waiting requests and kill the workers with in-flight requests; :meth:`stop` ends the others."""
        self.fail_waiting(unavailable(STOPPING))
        for worker in self._all_workers():
            worker.abandon()

    async def stop(self, seconds: float | None) -> None:
        """Fail waiting requests and end all workers; by force after ``seconds``, or after their timeouts if None."""
        self.fail_waiting(unavailable(STOPPING))
        await asyncio.gather(*(worker.stop(seconds) for worker in self._all_workers()))
        self._set_timer(0)
        # Breaks the reference cycles between this dispatcher, the workers and the scheduler.
        for workers in (self._workers, self._leaving, self._instances, self._free):
            workers.clear()
        self._scheduler.on_cancelled = ignore
        if self.resources is not None:
            self.resources.forget_all()

    def fail_waiting(self, error: ConchError) -> None:
        """Fail all waiting requests with ``error``."""
        for request in self._queue.drain():
            request.fail(error)
        self._schedule_dispatch()  # instances without work stop competing for resources

    # Workers

    @property
    def runtime_facts(self) -> RuntimeFacts:
        """The merged runtime facts of the workers, with the LoRA adapters that clients have loaded."""
        facts = merged(worker.runtime_facts for worker in self._workers)
        names = (*adapters(facts), *self.adapters)
        return facts | {ADAPTERS: json.dumps(names)} if names else facts

    async def load_adapter(self, name: str, path: str, in_place: bool) -> None:
        async with self._adapting:
            loaded: list[WorkerProcess] = []
            try:
                for process in self.processes:
                    await process.load_adapter(name, path, in_place)
                    loaded.append(process)
            except ConchError:
                if name not in self.adapters:
                    await _unload_adapter(name, loaded)
                else:
                    for process in loaded:
                        process.register_adapter(name, self.adapters[name])
                raise
            self.adapters[name] = path
            for process in self.processes:
                if process not in loaded:  # started in the meantime
                    process.register_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        async with self._adapting:
            if name not in self.adapters:
                raise not_found(f"LoRA adapter '{name}' was not loaded by a client")
            del self.adapters[name]
            errors = await _unload_adapter(name, self.processes)
            if errors:
                raise errors[0]

    def add(self, worker: SupervisedWorker) -> None:
        """Add a worker, which calls :meth:`on_available` when it can run batches."""
        if self.resources is not None:
            self.resources.assign(worker)
        self._workers.append(worker)

    def placements(self) -> list[WorkerPlacement]:
        """Return the placements of the workers that are not retiring."""
        return [worker.placement for worker in self._workers]

    def keep(self, placements: Collection[WorkerPlacement]) -> None:
        """Retire the workers with a placement not in ``placements``; their requests and sequences end first."""
        self._leaving += [worker for worker in self._workers if worker.placement not in placements]
        self._workers = [worker for worker in self._workers if worker.placement in placements]
        self._retire_vacant()

    async def finish_retiring(self) -> None:
        """Wait until the retiring workers have ended; cancelling the wait does not affect them."""
        if self._retiring:
            await asyncio.wait(list(self._retiring))

    def _retire_vacant(self) -> None:
        """End the leaving workers that have no sequences, after their in-flight requests."""
        for worker in list(self._leaving):
            vacant = [self._scheduler.retire(key) for key in self._keys(worker)]
            if all(vacant):
                self._leaving.remove(worker)
                self._remove_instances(worker)
                task = self._loop.create_task(worker.retire())
                self._retiring[task] = worker
                task.add_done_callback(self._retired)

    def _retired(self, task: asyncio.Task[None]) -> None:
        worker = self._retiring.pop(task)
        if self.resources is not None:
            self.resources.forget(worker)
            self._schedule_dispatch()

    def on_available(self, worker: SupervisedWorker) -> None:
        """Add the instances of ``worker``, which has started or restarted."""
        self._lost = None
        if worker not in self._workers:
            return
        limited = self.resources.of_slots(worker) if self.resources is not None else [None] * worker.slots
        for instance in limited:
            # Unique: a retiring worker may still exist when another starts at its placement.
            key = f"{worker.name}/{next(self._numbers)}"
            self._instances[key] = self._free[key] = Instance(key, worker, instance)
            self._scheduler.add_instance(key, monotonic_ns())
        self._schedule_dispatch()

    def on_died(self, worker: SupervisedWorker, reason: RestartReason) -> None:
        """Remove the instances of ``worker``; its sequences fail, because the model's state for them is lost."""
        self._statistics.restarts[reason] += 1
        self._remove_instances(worker)
        self._schedule_dispatch()

    def on_lost(self, worker: SupervisedWorker) -> None:
        """If no other worker is ready, fail waiting requests and refuse new ones: ``worker`` could not be restarted."""
        if not any(worker.ready for worker in (*self._workers, *self._leaving)):
            self._lost = _unhealthy(worker)
            self.fail_waiting(self._lost)

    def on_prepared(self) -> None:
        """Dispatch again, because a worker has reported lengths of requests, which may change the next batch."""
        self._schedule_dispatch()

    def on_progress(self, pid: int, progress: Mapping[str, Any]) -> None:
        """Record the generation progress of the worker process ``pid``; empty when it has ended."""
        self._statistics.record_generation(pid, progress)

    def _all_workers(self) -> list[SupervisedWorker]:
        return [*self._workers, *self._leaving, *self._retiring.values()]

    def _keys(self, worker: SupervisedWorker) -> list[str]:
        return [key for key, instance in self._instances.items() if instance.worker is worker]

    def _remove_instances(self, worker: SupervisedWorker) -> None:
        for key in self._keys(worker):
            del self._instances[key]
            self._free.pop(key, None)
            self._scheduler.lose(key, _unhealthy(worker), monotonic_ns())

    # Batches

    def _schedule_dispatch(self) -> None:
        # Deferred until the current callbacks have run, so that requests that arrived together can share a batch.
        if not self._dispatch_scheduled:
            self._dispatch_scheduled = True
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
        """Run all batches that are due on free instances."""
        self._dispatch_scheduled = False
        if self.resources is not None:
            self._compete(self.resources)
        else:
            while (decision := self._run_next(self._free)).batch:
                pass
            self._set_timer(decision.wake_at)
        if self._leaving:
            self._retire_vacant()

    def _run_next(self, free: Collection[str]) -> BatchDecision:
        """Run the next batch on one of the ``free`` instances, if one is due."""
        decision = self._scheduler.assign(free, monotonic_ns())
        if decision.batch:
            instance = self._free.pop(decision.instance)
            if self.resources is not None and instance.limited is not None:
                self.resources.begin(instance.limited)
            instance.worker.execute(decision.batch, partial(self._done, instance))
        return decision

    def _compete(self, resources: InstanceResources) -> None:
        """Stage the free instances that could run requests; the rate limiter grants them their resources.

        An engine that runs takes further requests, but only while no other model waits for its resources: otherwise it
        might never release them.
        """
        self._set_timer(self._scheduler.assign((), monotonic_ns()).wake_at)
        staged = set()
        for key in list(self._scheduler.eager(self._free)):
            limited = self._free[key].limited
            assert limited is not None
            if not limited.running:
                staged.add(limited)
            elif not resources.contended(limited):
                self._run_next((key,))
        resources.stage(staged)

    def _granted(self, limited: LimitedInstance) -> bool:
        """Run a batch on an instance that has its resources; return False if none is due."""
        free = [key for key, instance in self._free.items() if instance.limited is limited and instance.worker.ready]
        if not free:
            return False
        decision = self._run_next(free)
        if decision.batch:
            self._schedule_dispatch()  # other instances, or slots of this one, may have become eager or idle
        elif decision.wake_at:
            self._set_timer(decision.wake_at)
        return bool(decision.batch)

    def _done(self, instance: Instance, execution: Execution) -> None:
        self._record(instance.worker, execution)
        ready, kept = instance.worker.ready, instance.key in self._instances
        if ready and execution.unfinished and not (kept and self._scheduler.continues_unfinished):
            instance.worker.execute(execution.unfinished, partial(self._done, instance))
            return
        again = execution.unfinished or execution.rescheduled
        if execution.rescheduled and not self._scheduler.iterative:
            for request in execution.rescheduled:
                self._refuse_to_reschedule(request)
            again = ()
        if self.resources is not None and instance.limited is not None:
            self.resources.end(instance.limited)
        if ready and kept:
            self._free[instance.key] = instance
            self._scheduler.done(instance.key, monotonic_ns(), again)
        if not ready or self._scheduler.stateful:
            self._schedule_dispatch()
        elif self.resources is not None or self._scheduler.eager(self._free):
            self._dispatch()  # before the responses of this batch are delivered, so that the worker is not idle

    def _set_timer(self, wake_at: int) -> None:
        """Dispatch again at ``wake_at`` (ns, 0 for never); an earlier timer is kept."""
        if self._timer is not None:
            if self._wake_at <= wake_at:
                return
            self._timer.cancel()
            self._timer = None
        if wake_at:
            self._wake_at = wake_at
            self._timer = self._loop.call_later(max(wake_at - monotonic_ns(), 0) / 1e9, self._wake)

    def _wake(self) -> None:
        self._timer = None
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
        """Record a response of a response sender, except for a batch row without a request."""
        if not isinstance(request, NullRequest):
            self._statistics.record_sent(request, response)


def _unhealthy(worker: SupervisedWorker) -> ConchError:
    return internal(f"Stub process '{worker.name}' is not healthy.")


async def _unload_adapter(name: str, processes: Sequence[WorkerProcess]) -> list[BaseException]:
    """Unload a LoRA adapter from all processes; returns the errors of those that have not ended."""
    results = await asyncio.gather(*(process.unload_adapter(name) for process in processes), return_exceptions=True)
    return [
        result
        for process, result in zip(processes, results, strict=True)
        if isinstance(result, BaseException) and process.alive
    ]
