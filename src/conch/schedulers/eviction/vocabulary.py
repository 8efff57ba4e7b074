"""What goes in and out of the state machine: limits, waiting requests, what a load needs, and the decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from conch.errors import ConchError
from conch.schedulers.eviction.capacity import Capacity


@dataclass(frozen=True, slots=True)
class CapacityLimits:
    """The flags of on-demand mode; in ``capacity``, 0 is no limit.  Seconds.

    ``min_loaded``: how long a model keeps its place while it is in use and another one waits for it, and how long that
    one waits before; a model whose load took longer keeps it as long as that.
    ``wait``: how long a request waits.  ``waiting`` and ``waiting_per_model``: how many may.
    """

    capacity: Capacity = field(default_factory=Capacity)
    min_loaded: float = 10.0
    wait: float = 60.0
    waiting: int = 10_000
    waiting_per_model: int = 1_000


class Phase(Enum):
    """The phase of a model that has room."""

    LOADING = auto()
    LOADED = auto()
    LEAVING = auto()


class ModelUse(Protocol):
    """What loaded models do, which changes with every request and is therefore asked for."""

    def busy(self, name: str) -> bool:
        """Whether requests wait or run, or something else holds the model."""

    def last_used(self, name: str) -> float:
        """When its last request ended (s)."""


@dataclass(eq=False, slots=True)
class Waiter:
    """A request for a model that is not loaded; ``proceed`` is called with None once it is, else with the error.

    After it is ``withdrawn``, ``proceed`` is not called, even if the decision has been made.
    """

    name: str
    proceed: Callable[[ConchError | None], None]
    since: float
    deadline: float
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one model takes, and the models without which it cannot run: the members of an ensemble."""

    capacity: Capacity
    members: frozenset[str] = frozenset()


#: What a load brings: the model itself and, for an ensemble, all of its members, theirs included.
Footprints = Mapping[str, Footprint]


@dataclass(frozen=True, slots=True)
class ReadFootprints:
    """Find out what a load of the model needs, and call ``planned``, ``unknown`` or ``failed``."""

    name: str


@dataclass(frozen=True, slots=True)
class Load:
    """Load the model with all of its members, call ``serves`` as each does, and ``loaded`` or ``failed`` at the end."""

    name: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Unload the model as soon as its requests have ended, and call ``left``; it takes no new ones from now on."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Let a request go on: its model is loaded, or it is refused because of ``error``."""

    waiter: Waiter
    error: ConchError | None


Decision = ReadFootprints | Load | Evict | ResumeRequest
