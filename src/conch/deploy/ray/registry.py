"""The replica registry: replicas register with it, ingresses watch it.

``RegistryState`` and ``KnownReplicas`` do no I/O and take the time as an argument (s, monotonic); the deployment is
``ReplicaRegistry``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

#: The interval of registering (s), and the time without it after which a replica is removed (s).
REGISTER_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 10.0
#: The time for which an ending replica waits for all ingresses to stop using it (s); hanging ingresses are ignored.
DEREGISTER_SECONDS: Final = 3.0
#: The time for which an ingress uses a replica missing in the registry, as after a restart of the registry (s).
FORGET_SECONDS: Final = 30.0
#: The timeout of waiting for a change (s); an ingress that is silent for three times as long is removed.
WATCH_SECONDS: Final = 5.0
_GONE_SECONDS: Final = 3 * WATCH_SECONDS
#: The interval of checking for silent replicas (s).
EXPIRE_SECONDS: Final = SILENCE_SECONDS / 5
#: The number of deregistered replicas to remember, for ingresses that poll late.
MOST_DEREGISTERED: Final = 10_000


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a replica serves; ``config`` is its configuration in JSON, empty while it is not loaded.

    ``labels`` are the class labels of its outputs, by output.
    """

    name: str
    config: str = ""
    versions: tuple[int, ...] = ()
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """A replica: its deployment and the deployment's version, its node, URLs and models.

    ``started`` is the time of its start (ns since 1970).
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
    """An ingress: its node, and the host and port of each front end (``http``, ``grpc``, ``metrics``)."""

    id: str
    node: str
    addresses: Mapping[str, tuple[str, int]]


@dataclass(frozen=True, slots=True)
class RegistrySnapshot:
    """The registry at a ``revision``: all replicas, and the ids of deregistered ones."""

    revision: int
    replicas: tuple[ReplicaRecord, ...]
    deregistered: frozenset[str]


class RegistryState:
    """The registered replicas.

    ``revision`` increases with every change. It starts at ``first``, a time (ns), so that it never repeats a revision
    of an earlier registry.
    """

    def __init__(self, first: int) -> None:
        self.revision = first
        self._replicas: dict[str, tuple[ReplicaRecord, float]] = {}
        self._deregistered: dict[str, None] = {}

    def register(self, record: ReplicaRecord, now: float) -> bool:
        """Add a replica; returns whether that changes anything. Deregistered replicas cannot return."""
        if record.id in self._deregistered:
            return False
        known = self._replicas.get(record.id)
        self._replicas[record.id] = record, now
        if known is not None and known[0] == record:
            return False
        self.revision += 1
        return True

    def deregister(self, replica: str) -> None:
        """Remove a replica permanently."""
        self._replicas.pop(replica, None)
        self._deregistered[replica] = None
        if len(self._deregistered) > MOST_DEREGISTERED:
            del self._deregistered[next(iter(self._deregistered))]
        self.revision += 1

    def expire(self, now: float) -> bool:
        """Remove replicas that have been silent for too long; returns whether there were any."""
        silent = [id for id, (_, registered) in self._replicas.items() if now - registered > SILENCE_SECONDS]
        for id in silent:
            del self._replicas[id]
        self.revision += bool(silent)
        return bool(silent)

    def snapshot(self) -> RegistrySnapshot:
        """Return the current state."""
        records = tuple(record for record, _ in self._replicas.values())
        return RegistrySnapshot(self.revision, records, frozenset(self._deregistered))


class KnownReplicas:
    """The replicas that an ingress uses, including those missing in a restarted, empty registry."""

    def __init__(self) -> None:
        self.revision = 0
        #: By id, with the time since which the replica is missing in the registry (s), or None.
        self._replicas: dict[str, tuple[ReplicaRecord, float | None]] = {}

    def learn(self, snapshot: RegistrySnapshot, now: float) -> None:
        """Apply a snapshot of the registry."""
        self.revision = snapshot.revision
        for id in snapshot.deregistered & self._replicas.keys():
            del self._replicas[id]
        for id, (record, since) in list(self._replicas.items()):
            # Counted from the first snapshot without it instead of the last with it, because the registry may have been
            # unavailable for long between the two.
            if now - (now if since is None else since) > FORGET_SECONDS:
                del self._replicas[id]
            else:
                self._replicas[id] = record, now if since is None else since
        for record in snapshot.replicas:
            self._replicas[record.id] = record, None

    @property
    def replicas(self) -> list[ReplicaRecord]:
        """The usable replicas, sorted by id: the same order in every ingress."""
        return sorted((record for record, _ in self._replicas.values()), key=lambda record: record.id)


def by_model(replicas: Iterable[ReplicaRecord]) -> dict[str, list[tuple[ReplicaRecord, ServedModel]]]:
    """Group replicas by model."""
    models: dict[str, list[tuple[ReplicaRecord, ServedModel]]] = {}
    for record in replicas:
        for model in record.models:
            models.setdefault(model.name, []).append((record, model))
    return models


class ReplicaRegistry:
    """The deployment of the registry, with one replica; everything runs on that replica's event loop."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._state = RegistryState(time.time_ns())
        self._changed = asyncio.Condition()
        #: Ingresses by id, with the revision that each follows and the time of its last call (s, monotonic).
        self._watchers: dict[str, tuple[IngressRecord, int, float]] = {}
        self._failures: dict[str, str] = {}
        self._expiring = asyncio.get_running_loop().create_task(self._expire())

    async def register(self, record: ReplicaRecord) -> None:
        """Add a replica or renew its registration."""
        if self._state.register(record, time.monotonic()):
            self._failures.pop(record.deployment, None)
            await self._notify()

    async def deregister(self, replica: str) -> None:
        """Remove a replica; returns when no responding ingress uses it any longer."""
        self._state.deregister(replica)
        revision = self._state.revision
        await self._notify()
        try:
            async with asyncio.timeout(DEREGISTER_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self._all_follow(revision))
        except TimeoutError:
            pass  # a hanging ingress detects it when its connections are refused

    async def watch(self, ingress: IngressRecord, followed: int) -> RegistrySnapshot:
        """Return a snapshot as soon as the revision differs from ``followed``, or after ``WATCH_SECONDS``.

        ``ingress`` is the caller, and ``followed`` is the revision that it follows.
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
        """Remove an ending ingress."""
        self._watchers.pop(ingress, None)
        await self._notify()

    async def failed(self, deployment: str, reason: str) -> None:
        """Record why a replica of ``deployment``, or the ingress of a node, could not start."""
        self._failures[deployment] = reason

    async def forget_failures(self) -> None:
        """Remove all failures, before the application is deployed again."""
        self._failures.clear()

    async def failures(self) -> Mapping[str, str]:
        """Return why deployments could not start, without those that have started since."""
        return dict(self._failures)

    async def ingresses(self) -> tuple[IngressRecord, ...]:
        """Return all watching ingresses."""
        self._forget_watchers()
        return tuple(record for record, _, _ in self._watchers.values())

    async def replicas(self) -> tuple[ReplicaRecord, ...]:
        """Return all registered replicas."""
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
            await asyncio.sleep(EXPIRE_SECONDS)
            if self._state.expire(time.monotonic()):
                await self._notify()
