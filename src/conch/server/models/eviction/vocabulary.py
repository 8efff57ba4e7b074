"""Inputs and outputs of the on-demand state machine: limits, waiting requests, footprints and decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from conch.core.errors import ConchError
from conch.server.models.eviction.capacity import Capacity


@dataclass(frozen=True, slots=True)
class CapacityLimits:
    """The limits of on-demand mode; times in seconds, 0 in ``capacity`` means no limit.

    ``min_loaded``: minimum time for which a busy model stays loaded while another model waits, and for which the other
    model waits before a busy model is evicted. A busy model whose load took longer stays loaded for that time instead.
    ``wait``: timeout of waiting requests. ``waiting`` and ``waiting_per_model``: maximum number of waiting requests.
    """

    capacity: Capacity = field(default_factory=Capacity)
    min_loaded: float = 10.0
    wait: float = 60.0
    waiting: int = 10_000
    waiting_per_model: int = 1_000


class Phase(Enum):
    """The phase of a model that takes capacity."""

    LOADING = auto()
    LOADED = auto()
    LEAVING = auto()


class ModelUse(Protocol):
    """The current use of loaded models; queried, because it changes with every request."""

    def busy(self, name: str) -> bool:
        """Whether requests wait or run, or the model is held for another reason."""

    def last_used(self, name: str) -> float:
        """Return when the last request of the model ended (s)."""


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that waits for a model to be loaded.

    ``proceed`` is called with None when the model is loaded, or with an error. After the request is ``withdrawn``,
    ``proceed`` is not called, even if the decision has been made.
    """

    name: str
    proceed: Callable[[ConchError | None], None]
    since: float
    deadline: float
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class Footprint:
    """The capacity that a model needs, and the models of its steps if it is an ensemble."""

    capacity: Capacity
    members: frozenset[str] = frozenset()


#: The models of a load by name: the model itself and, for an ensemble, the models of all its steps, recursively.
Footprints = Mapping[str, Footprint]


@dataclass(frozen=True, slots=True)
class ReadFootprints:
    """Read the footprints of a load of the model, then call ``planned``, ``unknown`` or ``unreadable``."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Load the model with all its steps; call ``serves`` for each ready model, then ``loaded`` or ``failed``.

    Loads are compared by identity, because a model may be loaded again before an earlier load has ended.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Unload the model when its requests have ended, then call ``left``; it accepts no new requests from now on."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Resume a waiting request because its model is loaded, or refuse it with ``error``."""

    waiter: Waiter
    error: ConchError | None


Decision = ReadFootprints | Load | Evict | ResumeRequest
