"""The error of measured figures, and the pooling of repeated measurements.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any, Final

from conch.measure.analyze.results import ModelFigures, Point

#: Figures that differ by less than this fraction are equal, even if windows agree better: the next run on the same
#: machine may differ by as much.
NOISE: Final = 0.02


def standard_error(point: Point, model: str, metric: str) -> float:
    """Return the relative standard error of a figure; cost is per inference, so its error is that of the throughput."""
    known = point.models[model].noise if model in point.models else {}
    return known.get("throughput" if metric == "cost" else metric, 0.0)


def tolerance(point: Point, model: str, metric: str) -> float:
    """Return the relative tolerance of a figure: two standard errors, at least ``NOISE``."""
    return max(NOISE, 2 * standard_error(point, model, metric))


def pooled(points: Sequence[Point]) -> Point:
    """Pool the measurements of one candidate at one load: means of the figures, sums of the requests.

    Uses the completed points if there are any, and of those the undisturbed ones if there are any.
    """
    points = [point for point in points if not point.stopped] or points
    points = [point for point in points if not point.disturbed] or points
    last = points[-1]
    if len(points) == 1:
        return last
    resources = [point.resources for point in points if point.resources is not None]
    return Point(
        last.load,
        {model: _pooled([point.models[model] for point in points]) for model in last.models},
        max(resources, key=lambda used: used.memory, default=None),
        disturbed=last.disturbed,
        warnings=tuple(dict.fromkeys(warning for point in points for warning in point.warnings)),
        stopped=last.stopped,
    )


def _pooled(parts: Sequence[ModelFigures]) -> ModelFigures:
    answered = [part for part in parts if part.requests] or parts
    return ModelFigures(
        _mean(part.throughput for part in parts),
        _mean(part.average for part in answered),
        _means([part.percentiles for part in answered]),
        _mean(part.client_send for part in answered),
        _mean(part.client_wait for part in answered),
        _means([part.stages for part in answered]),
        sum(part.requests for part in parts),
        sum(part.failed for part in parts),
        {name: error / sqrt(len(parts)) for name, error in _means([part.noise for part in parts]).items()},
    )


def _means(parts: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """The mean of each key that all parts have."""
    return {key: _mean(part[key] for part in parts) for key in parts[0] if all(key in part for part in parts)}


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)
