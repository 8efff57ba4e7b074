"""The figures that goals can name: their names here and in model analyzer, their units and their values at a point.

Pure. Values are in base units: seconds, bytes, inferences per second, fractions of 1, watts, cores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from conch.measure.analyze.judging.goals import Price
from conch.measure.analyze.results import ModelFigures, Point
from conch.measure.perf.server.resources import ResourceFigures

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
        Figure("queue", False, "ms", 1e-3),
        Figure("compute_input", False, "ms", 1e-3),
        Figure("compute_infer", False, "ms", 1e-3),
        Figure("compute_output", False, "ms", 1e-3),
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


def _gpu_utilisation(resources: ResourceFigures) -> float | None:
    shares = [gpu.utilisation for gpu in resources.gpus.values()]
    return sum(shares) / len(shares) if shares else None


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
    **{name: _stage(name) for name in ("queue", "compute_input", "compute_infer", "compute_output")},
}

_OF_SERVER: Final[Mapping[str, Callable[[ResourceFigures], float | None]]] = {
    "memory": lambda resources: resources.memory,
    "cores": lambda resources: resources.cores,
    "gpu_memory": lambda resources: resources.gpu_memory if resources.gpus else None,
    "gpu_utilisation": _gpu_utilisation,
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
