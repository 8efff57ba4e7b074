"""The replica registry: replicas register with it, ingresses watch it.

``RegistryState`` and ``KnownReplicas`` are pure, and take the time as an argument (s, monotonic); the deployment is
``ReplicaRegistry``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

#: How often a replica registers (s), and the silence after which it is removed.
REGISTER_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 10.0
#: How long a replica that ends waits for every ingress to stop using it (s); an ingress that hangs is not waited for.
DEREGISTER_SECONDS: Final = 3.0
#: How long an ingress keeps using a replica that is missing in the registry, as after a restart of the registry (s).
FORGET_SECONDS: Final = 30.0
#: How long an ingress waits for a change before it asks again (s); one that is silent for three times that is removed.
WATCH_SECONDS: Final = 5.0
_GONE_SECONDS: Final = 3 * WATCH_SECONDS
#: How often silent replicas are looked for (s).
_EXPIRE_SECONDS: Final = SILENCE_SECONDS / 5
#: How many deregistered replicas are remembered, for ingresses that ask late.
_REMEMBERED: Final = 10_000


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a replica serves; ``config`` is its configuration in JSON, empty while it is not loaded.

    ``labels`` are those of its outputs' classes, by output.
    """

    name: str
    config: str = ""
    versions: tuple[int, ...] = ()
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """A replica: its deployment and the version of that, its node, its URLs, and its models.

    ``started`` is when it did (ns since 1970).
    """

    id: str
    deployment: str
    version: str
    started: int
    node: str
    http: str
    grpc: str
    models: tuple[ServedModel, ...]


@dataclass(frozen=True, slots=True)
class IngressRecord:
    """An ingress: its node, and the host and port of each of its front ends (``http``, ``grpc``, ``metrics``)."""

    id: str
    node: str
    addresses: Mapping[str, tuple[str, int]]


@dataclass(frozen=True, slots=True)
class RegistrySnapshot:
    """The registry at a ``revision``: all replicas, and the ids of those that have deregistered."""

    revision: int
    replicas: tuple[ReplicaRecord, ...]
    deregistered: frozenset[str]


class RegistryState:
    """The replicas that have registered.

    ``revision`` changes with every change, and never repeats one of an earlier registry: it begins with ``first``, a
    time (ns).
    """

    def __init__(self, first: int) -> None:
        self.revision = first
        self._replicas: dict[str, tuple[ReplicaRecord, float]] = {}
        self._deregistered: dict[str, None] = {}

    def register(self, record: ReplicaRecord, now: float) -> bool:
        """Add a replica; returns whether that changes anything.  One that has deregistered does not come back."""
        if record.id in self._deregistered:
            return False
        known = self._replicas.get(record.id)
        self._replicas[record.id] = record, now
        if known is not None and known[0] == record:
            return False
        self.revision += 1
        return True

    def deregister(self, replica: str) -> None:
        """Remove a replica for good."""
        self._replicas.pop(replica, None)
        self._deregistered[replica] = None
        if len(self._deregistered) > _REMEMBERED:
            del self._deregistered[next(iter(self._deregistered))]
        self.revision += 1

    def expire(self, now: float) -> bool:
        """Remove the replicas that have been silent for too long; returns whether there were any."""
        silent = [id for id, (_, registered) in self._replicas.items() if now - registered > SILENCE_SECONDS]
        for id in silent:
            del self._replicas[id]
        self.revision += bool(silent)
        return bool(silent)

    def snapshot(self) -> RegistrySnapshot:
        """The registry as it is now."""
        records = tuple(record for record, _ in self._replicas.values())
        return RegistrySnapshot(self.revision, records, frozenset(self._deregistered))


class KnownReplicas:
    """The replicas that one ingress knows: it keeps them when the registry restarts and is empty."""

    def __init__(self) -> None:
        self.revision = 0
        #: By id, with the time since which the replica is missing in the registry (s), or None.
        self._replicas: dict[str, tuple[ReplicaRecord, float | None]] = {}

    def learn(self, snapshot: RegistrySnapshot, now: float) -> None:
        """Take over a snapshot of the registry."""
        self.revision = snapshot.revision
        for id in snapshot.deregistered & self._replicas.keys():
            del self._replicas[id]
        for id, (record, since) in list(self._replicas.items()):
            # Counted from the first snapshot without it, not from the last with it: the registry itself may have been
            # away for long between the two.
            if now - (now if since is None else since) > FORGET_SECONDS:
                del self._replicas[id]
            else:
                self._replicas[id] = record, now if since is None else since
        for record in snapshot.replicas:
            self._replicas[record.id] = record, None

    @property
    def replicas(self) -> list[ReplicaRecord]:
        """The replicas that may be used, sorted by id: the same order in every ingress."""
        return sorted((record for record, _ in self._replicas.values()), key=lambda record: record.id)


def by_model(replicas: Iterable[ReplicaRecord]) -> dict[str, list[tuple[ReplicaRecord, ServedModel]]]:
    """The replicas of each model."""
    models: dict[str, list[tuple[ReplicaRecord, ServedModel]]] = {}
    for record in replicas:
        for model in record.models:
            models.setdefault(model.name, []).append((record, model))
    return models


class ReplicaRegistry:
    """The deployment that keeps the registry, with one replica; everything runs on that replica's event loop."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._state = RegistryState(time.time_ns())
        self._changed = asyncio.Condition()
        #: The ingresses, the revision that each follows, and when it last asked (s, monotonic).
        self._watchers: dict[str, tuple[IngressRecord, int, float]] = {}
        self._failures: dict[str, str] = {}
        self._expiring = asyncio.get_running_loop().create_task(self._expire())

    async def register(self, record: ReplicaRecord) -> None:
        """Add a replica, or keep it."""
        if self._state.register(record, time.monotonic()):
            self._failures.pop(record.deployment, None)
            await self._notify()

    async def deregister(self, replica: str) -> None:
        """Remove a replica; returns when no ingress uses it any more, except for those that do not answer."""
        self._state.deregister(replica)
        revision = self._state.revision
        await self._notify()
        try:
            async with asyncio.timeout(DEREGISTER_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self._all_follow(revision))
        except TimeoutError:
            pass  # an ingress that hangs notices when its connections are refused

    async def watch(self, ingress: IngressRecord, followed: int) -> RegistrySnapshot:
        """Return a snapshot as soon as the revision differs from ``followed``, or after ``WATCH_SECONDS``.

        ``ingress`` asks, and ``followed`` is the revision that it follows.
        """
        self._watchers[ingress.id] = ingress, followed, time.monotonic()
        await self._notify()
        try:
            async with asyncio.timeout(WATCH_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self._state.revision != followed)
        except TimeoutError:
            pass
        return self._state.snapshot()

    async def leave(self, ingress: str) -> None:
        """Remove an ingress that ends."""
        self._watchers.pop(ingress, None)
        await self._notify()

    async def failed(self, deployment: str, reason: str) -> None:
        """Record why a replica of ``deployment``, or the ingress of a node, could not start."""
        self._failures[deployment] = reason

    async def forget_failures(self) -> None:
        """Remove all failures, before the application is deployed again."""
        self._failures.clear()

    async def failures(self) -> Mapping[str, str]:
        """Why deployments could not start, by deployment; without those that have started since."""
        return dict(self._failures)

    async def ingresses(self) -> tuple[IngressRecord, ...]:
        """All ingresses that watch."""
        self._forget_watchers()
        return tuple(record for record, _, _ in self._watchers.values())

    async def replicas(self) -> tuple[ReplicaRecord, ...]:
        """All registered replicas."""
        return self._state.snapshot().replicas

    def _all_follow(self, revision: int) -> bool:
        self._forget_watchers()
        return all(followed >= revision for _, followed, _ in self._watchers.values())

    def _forget_watchers(self) -> None:
        now = time.monotonic()
        self._watchers = {id: watcher for id, watcher in self._watchers.items() if now - watcher[2] < _GONE_SECONDS}

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_SECONDS)
            if self._state.expire(time.monotonic()):
                await self._notify()
