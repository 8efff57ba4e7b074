"""The goals of an analysis, weighted objectives and constraints by model: their metrics, and their wording.

Pure. The settings create them; :mod:`conch.measure.analyze.judging.objectives` evaluates them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from conch.measure.analyze.results import ModelFigures, Point
from conch.measure.perf.server.resources import ResourceFigures
from conch.measure.perf.server.statistics import SERVER_STAGES


@dataclass(frozen=True, slots=True)
class WeightedObjective:
    """A figure to optimize, by its name in :mod:`conch.measure.analyze.judging.goals`, with a relative weight."""

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
        metrics = [objective.metric for model_goals in self.models.values() for objective in model_goals.objectives]
        metrics += [constraint.metric for model_goals in self.models.values() for constraint in model_goals.constraints]
        return tuple(
            sorted({float(metric.rpartition("_p")[2]) for metric in metrics if metric.startswith("latency_p")})
        )


# Values are in base units: seconds, bytes, inferences per second, fractions of 1, watts, cores.


_HOUR: Final = 3600.0
_MILLION: Final = 1e6
_PERCENTILE: Final = re.compile(r"latency_p(\d{1,2}(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: its direction, the unit for display, and that unit in base units (``scale``)."""

    name: str
    more_is_better: bool
    unit: str
    scale: float

    def shown(self, value: float) -> str:
        """Format a value: ``12.3 ms``."""
        amount = value / self.scale
        return f"{amount:,.{0 if amount >= 100 else 1 if amount >= 10 else 2}f} {self.unit}".rstrip()


#: All figures except percentiles.
KNOWN: Final[Mapping[str, Figure]] = {
    figure.name: figure
    for figure in (
        Figure("throughput", True, "infer/s", 1.0),
        Figure("latency_average", False, "ms", 1e-3),
        Figure("client_send", False, "ms", 1e-3),
        Figure("client_wait", False, "ms", 1e-3),
        *(Figure(stage, False, "ms", 1e-3) for stage in SERVER_STAGES),
        Figure("memory", False, "MB", 1e6),
        Figure("cores", False, "cores", 1.0),
        Figure("gpu_memory", False, "MB", 1e6),
        Figure("gpu_utilisation", True, "%", 1e-2),
        Figure("gpu_power", False, "W", 1.0),
        Figure("cost", False, "per million inferences", 1.0),
    )
}


@cache
def metric(name: str) -> Figure | None:
    """Return the figure of a name, or None; any latency percentile is a figure, such as ``latency_p99.9``."""
    if _PERCENTILE.fullmatch(name):
        return Figure(name, False, "ms", 1e-3)
    return KNOWN.get(name)


def value_of(name: str, point: Point, model: str, price: Price) -> float | None:
    """Return the figure of a model at a point; None if it was not measured."""
    figures = point.models.get(model)
    if figures is not None and not figures.requests and name != "throughput":
        return None  # no latency without completed requests
    percentile = _percentile(name)
    if figures is not None and percentile is not None:
        return figures.percentiles.get(percentile)
    if figures is not None and name in _OF_MODEL:
        return _OF_MODEL[name](figures)
    if name == "cost":
        return _cost(point, price)
    if point.resources is not None and name in _OF_SERVER:
        return _OF_SERVER[name](point.resources)
    return None


@cache
def _percentile(name: str) -> float | None:
    """Return the number in the name of a percentile."""
    match = _PERCENTILE.fullmatch(name)
    return float(match[1]) if match else None


def _stage(name: str) -> Callable[[ModelFigures], float | None]:
    return lambda figures: figures.stages.get(name)


def _cost(point: Point, price: Price) -> float | None:
    """Return the price of a million inferences at the utilization of this point."""
    if not point.throughput:
        return None
    hourly = price.machine
    if not hourly:
        if point.resources is None:
            return None
        used = point.resources
        hourly = price.core * used.cores + price.gigabyte * used.memory / 1e9 + price.gpu * len(used.gpus)
    return hourly / _HOUR / point.throughput * _MILLION


_OF_MODEL: Final[Mapping[str, Callable[[ModelFigures], float | None]]] = {
    "throughput": lambda figures: figures.throughput,
    "latency_average": lambda figures: figures.average,
    "client_send": lambda figures: figures.client_send,
    "client_wait": lambda figures: figures.client_wait,
    **{name: _stage(name) for name in SERVER_STAGES},
}

_OF_SERVER: Final[Mapping[str, Callable[[ResourceFigures], float | None]]] = {
    "memory": lambda resources: resources.memory,
    "cores": lambda resources: resources.cores,
    "gpu_memory": lambda resources: resources.gpu_memory if resources.gpus else None,
    "gpu_utilisation": lambda resources: resources.gpu_utilisation,
    "gpu_power": lambda resources: sum(gpu.power for gpu in resources.gpus.values()) if resources.gpus else None,
}

#: Our names by model analyzer's (its ``docs/config.md``). Its latencies are in ms, and its memory in MB.
MODEL_ANALYZERS: Final[Mapping[str, str]] = {
    "perf_throughput": "throughput",
    "perf_latency_avg": "latency_average",
    "perf_latency_p90": "latency_p90",
    "perf_latency_p95": "latency_p95",
    "perf_latency_p99": "latency_p99",
    "perf_latency": "latency_p99",
    "perf_client_response_wait": "client_wait",
    "perf_client_send_recv": "client_send",
    "perf_server_queue": "queue",
    "perf_server_compute_input": "compute_input",
    "perf_server_compute_infer": "compute_infer",
    "perf_server_compute_output": "compute_output",
    "gpu_used_memory": "gpu_memory",
    "gpu_utilization": "gpu_utilisation",
    "gpu_power_usage": "gpu_power",
    "cpu_used_ram": "memory",
}

#: Common other names of figures.
ALIASES: Final[Mapping[str, str]] = {"latency": "latency_average", "average": "latency_average", "ram": "memory"}


#: Figures described as "least" rather than "lowest", because they are amounts.
_LEAST: Final = ("memory", "gpu_memory", "cores")


def in_words(goals: Goals) -> str:
    """Return the goals as text: one phrase if all models have the same goals, otherwise one per model."""
    phrases = {name: _phrase(model_goals) for name, model_goals in goals.models.items()}
    if len(set(phrases.values())) == 1:
        return next(iter(phrases.values()))
    return "; ".join(f"{name}: {phrase}" for name, phrase in phrases.items())


def title(figure: Figure) -> str:
    """Return the name of a figure for sentences: ``p99 latency``."""
    name = figure.name
    if name.startswith("latency_p"):
        return f"{name.removeprefix('latency_')} latency"
    if name == "latency_average":
        return "average latency"
    return name.replace("gpu_", "GPU ").replace("_", " ")


def _phrase(model_goals: ModelGoals) -> str:
    weighted = len({objective.weight for objective in model_goals.objectives}) > 1
    phrases = []
    for objective in model_goals.objectives:
        figure = _figure(objective.metric)
        degree = "highest" if figure.more_is_better else "least" if figure.name in _LEAST else "lowest"
        phrases.append(f"{degree} {title(figure)}" + (f" (weight {objective.weight:g})" if weighted else ""))
    limits = [bound for constraint in model_goals.constraints for bound in bounds(constraint)]
    return _listed(phrases) + (f" with {_listed(limits)}" if limits else "")


def bounds(constraint: Constraint) -> list[str]:
    """Return a constraint as text: ``p99 latency at most 100 ms``."""
    figure = _figure(constraint.metric)
    ends = (("at least", constraint.minimum), ("at most", constraint.maximum))
    return [f"{title(figure)} {end} {figure.shown(value)}" for end, value in ends if value is not None]


def _figure(name: str) -> Figure:
    figure = metric(name)
    assert figure is not None, name
    return figure


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
