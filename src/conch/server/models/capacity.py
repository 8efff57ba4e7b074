"""Data types of the on-demand planner (``eviction.py``): capacity, footprints, waiting requests and decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

from conch.core.errors import ConchError
from conch.machine.memory import mebibytes


class Capacity(NamedTuple):
    """An amount of the limited resources: ``models`` with their own workers, and their ``memory`` (bytes)."""

    models: int = 0
    memory: int = 0

    def plus(self, other: Capacity) -> Capacity:
        return Capacity(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Capacity) -> Capacity:
        return Capacity(*(a - b for a, b in zip(self, other, strict=True)))

    def within(self, limit: Capacity) -> bool:
        """Whether this is within ``limit``, where 0 means no limit."""
        return all(not maximum or amount <= maximum for amount, maximum in zip(self, limit, strict=True))


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

    ``caller`` is the model that sends it, empty if that is unknown; None for a request of a client.

    ``proceed`` is called with None when the model is loaded, or with an error. After the request is ``withdrawn``,
    ``proceed`` is not called, even if the decision has been made.
    """

    name: str
    proceed: Callable[[ConchError | None], None]
    since: float
    deadline: float
    caller: str | None = None
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class Footprint:
    """The capacity that a model needs, and the models of its steps if it is an ensemble."""

    capacity: Capacity
    step_models: frozenset[str] = frozenset()


#: The models of a load by name: the model itself and, for an ensemble, the models of all its steps, recursively.
Footprints = Mapping[str, Footprint]


@dataclass(frozen=True, slots=True)
class ReadFootprints:
    """Read the footprints of a load of the model, then call ``planned``, ``unknown`` or ``unreadable``."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Load the model with all its steps; call ``serves`` for each ready model, then ``loaded`` or ``failed``.

    Loads are compared by identity, because a model may be loaded again before an earlier load has ended. ``by_model``:
    a model waits for it.
    """

    name: str
    by_model: bool = False


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


def total(capacities: Iterable[Capacity]) -> Capacity:
    """Return the sum of several capacities."""
    whole = Capacity()
    for capacity in capacities:
        whole = whole.plus(capacity)
    return whole


def describe_shortage(needed: Capacity, used: Capacity, limit: Capacity) -> str:
    """Explain for each exceeded limit why ``needed`` does not fit beside ``used``."""
    parts: list[str] = []
    if limit.models and needed.models + used.models > limit.models:
        what = "1 model" if needed.models == 1 else f"{needed.models} models"
        others = f" and {used.models} others" if used.models else ""
        parts.append(f"{what}{others} are more than --max-loaded-models={limit.models}")
    if limit.memory and needed.memory + used.memory > limit.memory:
        others = f" and {mebibytes(used.memory)} of others" if used.memory else ""
        parts.append(f"{mebibytes(needed.memory)}{others} are more than --memory-budget={mebibytes(limit.memory)}")
    return ", and ".join(parts)
