"""What is wanted of a configuration: objectives with weights, and constraints, by model.

Pure.  Read by the settings; :mod:`conch.analyze.judging.objectives` computes with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WeightedObjective:
    """A figure to make good: ``metric`` as :mod:`conch.analyze.judging.metrics` names it; ``weight`` beside others."""

    metric: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Constraint:
    """A bound of a figure, in its base unit (seconds, bytes, inferences a second, shares of 1); both ends included."""

    metric: str
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class ModelGoals:
    """What is wanted of one model, and its ``weight`` beside the models that are profiled at the same time."""

    objectives: tuple[WeightedObjective, ...] = (WeightedObjective("throughput"),)
    constraints: tuple[Constraint, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour costs, in any currency: the machine as a whole, or by what is used of it.

    The defaults are no prices: a core counts 1 and memory as much as clouds charge for it beside a core, so that cost
    is in core hours.
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
        """The percentiles of latency that are needed, besides the usual ones."""
        metrics = [objective.metric for wanted in self.models.values() for objective in wanted.objectives]
        metrics += [constraint.metric for wanted in self.models.values() for constraint in wanted.constraints]
        return tuple(
            sorted({float(metric.rpartition("_p")[2]) for metric in metrics if metric.startswith("latency_p")})
        )
