"""Rate limiter: decides which model instance runs next when instances share resources.

Pure: dispatchers stage instances that have work and release them afterwards; the limiter calls back the instances that
may run. Source: Triton's rate limiter. Unlike there, the end of an instance may start several instances, as many as the
resources allow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import count
from operator import attrgetter
from typing import Final, NamedTuple

from conch.core.errors import invalid
from conch.machine import logs
from conch.options.triton_values import Resource

#: The device of a global resource, and the device of a ``--rate-limit-resource`` without a device.
GLOBAL: Final = -2
EVERY_DEVICE: Final = -1

_serial = count()


class ResourceKey(NamedTuple):
    """A resource on a device."""

    device: int
    name: str


class LimitedInstance:
    """A model instance that uses the ``required`` resources while it runs.

    ``run`` is called when the instance may run, and returns whether it does.
    """

    __slots__ = ("executions", "priority", "required", "run", "running", "serial")

    def __init__(self, required: Mapping[ResourceKey, int], priority: int, run: Callable[[], bool]) -> None:
        self.required = required
        self.priority = max(priority, 1)
        self.run = run
        self.executions = 0
        self.running = False
        self.serial = next(_serial)

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key, lowest first: an instance of priority 2 runs half as often as one of priority 1."""
        return self.executions * self.priority, self.serial


class InstanceRateLimiter:
    """The resources of a server and the instances that wait for them.

    ``resources`` are the available amounts; without any, the amount of each resource is the largest amount that an
    instance needs.
    """

    def __init__(self, resources: Iterable[Resource] = ()) -> None:
        self._declared: dict[ResourceKey, int] = {}
        for resource in resources:
            self._declared[ResourceKey(resource.device, resource.name)] = resource.amount
        self._instances: set[LimitedInstance] = set()
        self._staged: set[LimitedInstance] = set()
        #: The amounts that running instances use.
        self.taken: dict[ResourceKey, int] = {}
        self.pool: Mapping[ResourceKey, int] = {}
        self._attempting = False

    def register(self, instances: Collection[LimitedInstance]) -> None:
        """Register the instances of a model, all or none.

        Raises INVALID_ARG if a resource is insufficient, or both global and device-specific.
        """
        pool = self._pool_of(self._instances | set(instances))
        self._instances |= set(instances)
        self._set_pool(pool)

    def unregister(self, instances: Collection[LimitedInstance]) -> None:
        """Remove instances that have ended and let others run."""
        for instance in instances:
            self.unstage(instance)
            if instance.running:
                self._give_back(instance)
        self._instances -= set(instances)
        self._set_pool(self._pool_of(self._instances))
        self.attempt()

    def stage(self, instance: LimitedInstance) -> None:
        """Mark an instance as having work; :meth:`attempt` runs it in order."""
        self._staged.add(instance)

    def unstage(self, instance: LimitedInstance) -> None:
        """Mark an instance as having no work."""
        self._staged.discard(instance)

    def contended(self, instance: LimitedInstance, mates: Collection[LimitedInstance]) -> bool:
        """Whether a staged instance outside of ``mates`` needs a resource that ``instance`` uses."""
        return any(other not in mates and other.required.keys() & instance.required.keys() for other in self._staged)

    def attempt(self) -> None:
        """Run staged instances in order until the next one does not fit, so that large ones are not starved."""
        if self._attempting:
            return
        self._attempting = True
        try:
            while self._staged:
                first = min(self._staged, key=attrgetter("rank"))
                if not self._fits(first):
                    return
                self.unstage(first)
                self._take(first)
                if not first.run():
                    self._give_back(first)
        finally:
            self._attempting = False

    def release(self, instance: LimitedInstance) -> None:
        """Release the resources of an instance that has run; stage it again if needed, then call :meth:`attempt`."""
        if instance.running:
            instance.executions += 1
            self._give_back(instance)

    def _fits(self, instance: LimitedInstance) -> bool:
        required = instance.required.items()
        return all(self.taken.get(key, 0) + amount <= self.pool.get(key, 0) for key, amount in required)

    def _take(self, instance: LimitedInstance) -> None:
        instance.running = True
        for key, amount in instance.required.items():
            self.taken[key] = self.taken.get(key, 0) + amount

    def _give_back(self, instance: LimitedInstance) -> None:
        instance.running = False
        for key, amount in instance.required.items():
            self.taken[key] -= amount

    def _pool_of(self, instances: Collection[LimitedInstance]) -> dict[ResourceKey, int]:
        pool: dict[ResourceKey, int] = {}
        for instance in instances:
            for key, amount in instance.required.items():
                pool[key] = max(pool.get(key, 0), amount)
        if self._declared:
            for key, amount in sorted(pool.items()):
                pool[key] = self._declared_of(key)
                if pool[key] < amount:
                    raise invalid(
                        f'Resource count for "{key.name}" is limited to {pool[key]} which will prevent scheduling of '
                        f"one or more model instances, the minimum required count is {amount}"
                    )
        everywhere = {key.name for key in pool if key.device == GLOBAL}
        for key in sorted(pool):
            if key.device != GLOBAL and key.name in everywhere:
                raise invalid(
                    f'Resource "{key.name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )
        return pool

    def _set_pool(self, pool: Mapping[ResourceKey, int]) -> None:
        self.pool = pool
        lines, device = ["\nMax Resource Map===>"], None
        for key in sorted(pool):
            if key.device != device:
                device = key.device
                lines.append(f"\tDevice: {'GLOBAL' if device == GLOBAL else device}")
            lines.append(f"\t\tResource: {key.name}\t Count: {pool[key]}")
        logs.verbose(1, "%s\n", "\n".join(lines))

    def _declared_of(self, key: ResourceKey) -> int:
        """Return the configured amount of a resource; for a global resource, the largest amount of any device."""
        devices = (
            {resource.device for resource in self._declared} if key.device == GLOBAL else (key.device, EVERY_DEVICE)
        )
        return max((self._declared.get(ResourceKey(device, key.name), 0) for device in devices), default=0)
