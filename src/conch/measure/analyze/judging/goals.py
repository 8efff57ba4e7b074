"""The goals of an analysis: weighted objectives and constraints, by model.

Pure. The settings create them; :mod:`conch.measure.analyze.judging.objectives` evaluates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WeightedObjective:
    """A figure to optimize, by its name in :mod:`conch.measure.analyze.judging.metrics`, with a relative weight."""

    metric: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Constraint:
    """Inclusive bounds of a figure, in its base unit (seconds, bytes, inferences per second, fractions of 1)."""

    metric: str
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class ModelGoals:
    """The goals of one model, and its ``weight`` relative to the models profiled at the same time."""

    objectives: tuple[WeightedObjective, ...] = (WeightedObjective("throughput"),)
    constraints: tuple[Constraint, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Price:
    """The price of an hour in any currency: of the whole ``machine``, or of the resources used.

    The defaults are relative: a core is 1, and memory is priced relative to a core as in clouds, so that the cost is in
    core hours.
    """

    machine: float = 0.0
    core: float = 1.0
    gigabyte: float = 0.13
    gpu: float = 0.0


@dataclass(frozen=True)
class Goals:
    """The goals of the models that are profiled together, by name."""

    models: Mapping[str, ModelGoals]
    price: Price = field(default_factory=Price)

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The latency percentiles that the goals need."""
        metrics = [objective.metric for wanted in self.models.values() for objective in wanted.objectives]
        metrics += [constraint.metric for wanted in self.models.values() for constraint in wanted.constraints]
        return tuple(
            sorted({float(metric.rpartition("_p")[2]) for metric in metrics if metric.startswith("latency_p")})
        )
