"""Scores a point under the goals, and measures by how much it violates the constraints.

Pure. A score is relative to a reference point: 1.2 means that the weighted geometric mean of the objectives is 1.2
times as good. (An arithmetic mean of ratios would depend on which point is the denominator.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, inf, log

from conch.measure.analyze.judging.goals import Constraint, Goals
from conch.measure.analyze.judging.metrics import metric, value_of
from conch.measure.analyze.judging.noise import tolerance
from conch.measure.analyze.judging.wording import title
from conch.measure.analyze.results import Point

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
    for model, wanted in goals.models.items():
        total = sum(objective.weight for objective in wanted.objectives)
        for objective in wanted.objectives:
            figure = metric(objective.metric)
            assert figure is not None
            here, there = (value_of(objective.metric, figures, model, goals.price) for figures in (point, reference))
            weight = wanted.weight * objective.weight / total
            weights += weight
            if not valid(point) or here is None:
                return 0.0
            if not there:
                # The reference has no responses, or the figure is 0: there is no ratio.
                continue
            if not here:
                return 0.0 if figure.more_is_better else inf
            weighted += weight * (log(here / there) if figure.more_is_better else log(there / here))
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
        for model, wanted in goals.models.items()
        for objective in wanted.objectives
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
    for model, wanted in goals.models.items():
        for objective in wanted.objectives:
            if value_of(objective.metric, point, model, goals.price) is None:
                yield Violation(model, Constraint(objective.metric), None, inf)
        for constraint in wanted.constraints:
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
