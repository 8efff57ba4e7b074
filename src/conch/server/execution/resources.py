"""Resources of the instances of a model version, for a dispatcher with a rate limiter.

Instances are registered before their workers start, and belong to their worker until it has retired.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from conch.config.schema import InstanceGroup, ModelConfig
from conch.server.execution.starting import WorkerPlacement, instances_of
from conch.server.execution.worker import SupervisedWorker
from conch.server.schedulers.rate_limiter import GLOBAL, InstanceRateLimiter, LimitedInstance, ResourceKey


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

    def give_up(self, placements: Iterable[WorkerPlacement]) -> None:
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
        self.give_up(list(self._reserved))
        for worker in list(self._instances):
            self.forget(worker)

    def _all(self) -> list[LimitedInstance]:
        return [instance for instances in self._instances.values() for instance in instances]

    def _made(self, group: InstanceGroup, placement: WorkerPlacement) -> LimitedInstance:
        instance = LimitedInstance(_needs(group, placement.device), group.rate_limiter.priority, lambda: False)
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


def _needs(group: InstanceGroup, device: int) -> dict[ResourceKey, int]:
    return {
        ResourceKey(GLOBAL if getattr(resource, "global") else device, resource.name): resource.count
        for resource in group.rate_limiter.resources
    }
