"""Scores a point under the goals, with the noise of the score, and measures how far it violates the constraints.

Pure. A score is relative to a reference point: 1.2 means that the weighted geometric mean of the objectives is 1.2
times as good. (An arithmetic mean of ratios would depend on which point is the denominator.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from statistics import fmean
from typing import Any, Final

from conch.measure.analyze.judging.goals import Constraint, Goals, metric, title, value_of
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
    measured = [part for part in parts if part.requests] or parts
    return ModelFigures(
        fmean(part.throughput for part in parts),
        fmean(part.average for part in measured),
        _means([part.percentiles for part in measured]),
        fmean(part.client_send for part in measured),
        fmean(part.client_wait for part in measured),
        _means([part.stages for part in measured]),
        sum(part.requests for part in parts),
        sum(part.failed for part in parts),
        {name: error / sqrt(len(parts)) for name, error in _means([part.noise for part in parts]).items()},
    )


def _means(parts: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """The mean of each key that all parts have."""
    return {key: fmean(part[key] for part in parts) for key in parts[0] if all(key in part for part in parts)}


#: The fraction of requests that may fail at a valid point.
FAILURES = 0.001


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated constraint of a model.

    ``value`` is the figure (None: unknown), and ``excess`` the relative difference to the bound.
    """

    model: str
    constraint: Constraint
    value: float | None
    excess: float

    def __str__(self) -> str:
        figure = metric(self.constraint.metric)
        assert figure is not None
        if self.value is None:
            return f"{title(figure)} is not known"
        low = self.constraint.minimum is not None and self.value < self.constraint.minimum
        bound = self.constraint.minimum if low else self.constraint.maximum
        assert bound is not None
        return (
            f"{title(figure)} is {figure.shown(self.value)} and must be at {'least' if low else 'most'} "
            + figure.shown(bound)
        )


def score(point: Point, reference: Point, goals: Goals) -> float:
    """Return the score of a point relative to ``reference``; 0 if it is invalid or lacks the figure of an objective."""
    weighted, weights = 0.0, 0.0
    for model, model_goals in goals.models.items():
        total = sum(objective.weight for objective in model_goals.objectives)
        for objective in model_goals.objectives:
            figure = metric(objective.metric)
            assert figure is not None
            value, reference_value = (
                value_of(objective.metric, figures, model, goals.price) for figures in (point, reference)
            )
            weight = model_goals.weight * objective.weight / total
            weights += weight
            if not valid(point) or value is None:
                return 0.0
            if not reference_value:
                # The reference has no responses, or the figure is 0: there is no ratio.
                continue
            if not value:
                return 0.0 if figure.more_is_better else inf
            weighted += weight * (
                log(value / reference_value) if figure.more_is_better else log(reference_value / value)
            )
    return exp(weighted / weights) if weights else 0.0


def valid(point: Point) -> bool:
    """Return whether every model has responses, and at most the fraction ``FAILURES`` of its requests failed."""
    return bool(point.models) and all(
        model.requests > 0 and model.failed <= FAILURES * (model.requests + model.failed)
        for model in point.models.values()
    )


def knows_objectives(point: Point, goals: Goals) -> bool:
    """Return whether a point has the figures of all objectives."""
    return not any(
        value_of(objective.metric, point, model, goals.price) is None
        for model, model_goals in goals.models.items()
        for objective in model_goals.objectives
    )


def excess_known(point: Point, goals: Goals) -> float:
    """Return the total relative violation of the constraints with known values."""
    return sum(violation.excess for violation in violations(point, goals) if violation.value is not None)


def unknown(point: Point, goals: Goals) -> list[str]:
    """Return the names of the figures that the goals need and the point lacks."""
    missing = [violation.constraint.metric for violation in violations(point, goals) if violation.value is None]
    return [name.replace("_", " ") for name in dict.fromkeys(missing)]


def violations(point: Point, goals: Goals) -> Iterator[Violation]:
    """Yield the violations of constraints, including unknown values; the unknown value of an objective is one too."""
    for model, model_goals in goals.models.items():
        for objective in model_goals.objectives:
            if value_of(objective.metric, point, model, goals.price) is None:
                yield Violation(model, Constraint(objective.metric), None, inf)
        for constraint in model_goals.constraints:
            value = value_of(constraint.metric, point, model, goals.price)
            if value is None:
                yield Violation(model, constraint, None, inf)
                continue
            if constraint.maximum is not None and value > constraint.maximum:
                yield Violation(model, constraint, value, value / constraint.maximum - 1)
            if constraint.minimum is not None and value < constraint.minimum:
                yield Violation(model, constraint, value, constraint.minimum / value - 1 if value else inf)


@dataclass(frozen=True, slots=True, order=True)
class Worth:
    """The order of points, compared field by field: constraints satisfied, ``closeness`` (negative excess), score."""

    satisfied: bool
    closeness: float
    score: float

    @property
    def excess(self) -> float:
        """The total relative violation of the constraints."""
        return -self.closeness


def worth(point: Point | None, reference: Point | None, goals: Goals) -> Worth:
    """Return the worth of a point; the lowest worth if there is none."""
    if point is None or reference is None:
        return Worth(False, -inf, 0.0)
    over = excess(point, goals)
    return Worth(over == 0.0, -over, score(point, reference, goals))


def satisfied(point: Point, goals: Goals) -> bool:
    """Return whether a point is valid and satisfies all constraints."""
    return valid(point) and not any(True for _ in violations(point, goals))


def undecided(point: Point, goals: Goals) -> bool:
    """Return whether a valid point violates constraints only by noise, so that another measurement may satisfy them."""
    broken = list(violations(point, goals)) if valid(point) else []
    return bool(broken) and all(
        violation.value is not None
        and violation.excess <= tolerance(point, violation.model, violation.constraint.metric)
        for violation in broken
    )


def acceptable(point: Point, goals: Goals) -> bool:
    """Return whether a point is valid and violates no constraint by more than noise."""
    return satisfied(point, goals) or undecided(point, goals)


def excess(point: Point, goals: Goals) -> float:
    """Return the total relative violation of the constraints; 0 if all are satisfied."""
    return sum(violation.excess for violation in violations(point, goals)) if valid(point) else inf


# Called after every window of a measurement with a rival. Windows that agree lie within the fraction s (``conch perf
# -s``, 10 %) of their mean. If s is taken as the standard deviation of a window, which is far too high, then the mean
# of n windows and the mean of the rival's three are three standard errors apart when they differ by more than 3 s
# sqrt(1/n + 1/3): 35 % after one window, 27 % after two. A point that is worse by more is not worse by accident. A
# server that is still getting faster continues.


#: The relative deviation of windows from their mean.
STABILITY: Final = 0.1
#: Number of windows of the rival.
_RIVALS: Final = 3


def hopeless(windows: Sequence[Point], rival: Point | None, goals: Goals) -> bool:
    """Return whether the point being measured is clearly worse than ``rival``, or clearly violates a constraint.

    ``windows`` are its windows so far, each as a whole point; they have neither memory nor server stages, which are
    ignored. Without a rival that satisfies the constraints the result is False, because the candidate nearest to the
    constraints must be known.
    """
    if not windows or rival is None or not satisfied(rival, goals):
        return False
    if not all(map(valid, windows)) or _rising(windows):
        return False
    margin = 3 * STABILITY * sqrt(1 / len(windows) + 1 / _RIVALS)
    worse = all(knows_objectives(window, goals) and score(window, rival, goals) < 1 - margin for window in windows)
    return worse or all(excess_known(window, goals) > margin for window in windows)


def _rising(windows: Sequence[Point]) -> bool:
    """Return whether the last window is better than the first by more than windows differ."""
    return len(windows) > 1 and windows[-1].throughput > windows[0].throughput * (1 + STABILITY)
