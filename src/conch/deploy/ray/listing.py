"""Which replicas answer, and where: what the directory keeps and what every ingress knows of it.

Pure; the clock is passed in (s, monotonic).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

#: How often a replica says that it is there (s), and after what silence it is taken to be gone.
ANNOUNCE_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 10.0
#: How long a replica that ends waits for every ingress to know (s): one that hangs is not waited for any longer.
WITHDRAW_SECONDS: Final = 3.0
#: How long an ingress goes on asking a replica that the directory has lost sight of, as after its own restart (s).
FORGET_SECONDS: Final = 30.0
#: How many replicas that were withdrawn are remembered, for those who ask late.
_REMEMBERED: Final = 10_000


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a replica answers for; ``config`` is its configuration in JSON, empty while it is not loaded.

    ``labels`` are those of its outputs' classes, by output.
    """

    name: str
    config: str = ""
    versions: tuple[int, ...] = ()
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """A replica that answers: of which deployment and version of it, on which node, where, and for which models.

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
    """An ingress: on which node, and the host and port of each of its front ends (``http``, ``grpc``, ``metrics``)."""

    id: str
    node: str
    addresses: Mapping[str, tuple[str, int]]


@dataclass(frozen=True, slots=True)
class News:
    """What the directory says: its ``revision``, all replicas, and which have been withdrawn for good."""

    revision: int
    replicas: tuple[ReplicaRecord, ...]
    withdrawn: frozenset[str]


class Listing:
    """The replicas that have announced themselves.

    ``revision`` changes with every change, and is never that of another listing: it begins with ``first``, a time (ns).
    """

    def __init__(self, first: int) -> None:
        self.revision = first
        self._replicas: dict[str, tuple[ReplicaRecord, float]] = {}
        self._withdrawn: dict[str, None] = {}

    def announce(self, record: ReplicaRecord, now: float) -> bool:
        """Note that a replica is there; returns whether that is news.  One that was withdrawn does not come back."""
        if record.id in self._withdrawn:
            return False
        known = self._replicas.get(record.id)
        self._replicas[record.id] = record, now
        if known is not None and known[0] == record:
            return False
        self.revision += 1
        return True

    def withdraw(self, replica: str) -> None:
        """Forget a replica for good."""
        self._replicas.pop(replica, None)
        self._withdrawn[replica] = None
        if len(self._withdrawn) > _REMEMBERED:
            del self._withdrawn[next(iter(self._withdrawn))]
        self.revision += 1

    def expire(self, now: float) -> bool:
        """Forget the replicas that have been silent for too long; returns whether there were any."""
        silent = [name for name, (_, heard) in self._replicas.items() if now - heard > SILENCE_SECONDS]
        for name in silent:
            del self._replicas[name]
        self.revision += bool(silent)
        return bool(silent)

    def answer(self) -> News:
        """What is known now."""
        records = tuple(record for record, _ in self._replicas.values())
        return News(self.revision, records, frozenset(self._withdrawn))


class KnownReplicas:
    """What one ingress knows: a directory that starts again and knows nobody does not take away what it knew."""

    def __init__(self) -> None:
        self.revision = 0
        #: By id, with the time since which the directory has not known it (s); None while it does.
        self._listed: dict[str, tuple[ReplicaRecord, float | None]] = {}

    def learn(self, answer: News, now: float) -> None:
        """Take over what the directory says."""
        self.revision = answer.revision
        for gone in answer.withdrawn & self._listed.keys():
            del self._listed[gone]
        for lost, (record, since) in list(self._listed.items()):
            # Not since it was last heard of: meanwhile the directory itself may have been away for long.
            if now - (now if since is None else since) > FORGET_SECONDS:
                del self._listed[lost]
            else:
                self._listed[lost] = record, now if since is None else since
        for record in answer.replicas:
            self._listed[record.id] = record, None

    @property
    def replicas(self) -> list[ReplicaRecord]:
        """The replicas that may be asked, in the order of their names: the same in every ingress."""
        return sorted((record for record, _ in self._listed.values()), key=lambda record: record.id)


def by_model(replicas: Iterable[ReplicaRecord]) -> dict[str, list[tuple[ReplicaRecord, ServedModel]]]:
    """Who answers for which model."""
    found: dict[str, list[tuple[ReplicaRecord, ServedModel]]] = {}
    for record in replicas:
        for model in record.models:
            found.setdefault(model.name, []).append((record, model))
    return found
