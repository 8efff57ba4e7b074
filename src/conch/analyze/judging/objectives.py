"""How good a point is: its score under the goals, and by how much it breaks the constraints.

Pure.  A score is a ratio to a reference: 1.2 says that the weighted geometric mean of all objectives is 1.2 times as
good as there.  (A mean of ratios would depend on which of the two is divided by which; this one does not.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, inf, log

from conch.analyze.judging.goals import Constraint, Goals
from conch.analyze.judging.metrics import metric, value_of
from conch.analyze.judging.noise import tolerance
from conch.analyze.judging.wording import title
from conch.analyze.results import Point

#: The share of requests that may fail at a point that counts as valid.
FAILURES = 0.001


@dataclass(frozen=True, slots=True)
class Violation:
    """A constraint that a point breaks: of which model, its value (None: not known), and the ``excess`` over the bound
    as a share of it."""

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
    """How many times as good as ``reference`` a point is; 0 where it answered nothing or an objective is not known."""
    weighted, weights = 0.0, 0.0
    for model, wanted in goals.models.items():
        total = sum(objective.weight for objective in wanted.objectives)
        for objective in wanted.objectives:
            figure = metric(objective.metric)
            assert figure is not None
            here, there = (value_of(objective.metric, one, model, goals.price) for one in (point, reference))
            weight = wanted.weight * objective.weight / total
            weights += weight
            if not valid(point) or here is None:
                return 0.0
            if not there:
                # A reference that answered nothing, or a figure of 0: any value is as good as any other beside it.
                continue
            if not here:
                return 0.0 if figure.more_is_better else inf
            weighted += weight * (log(here / there) if figure.more_is_better else log(there / here))
    return exp(weighted / weights) if weights else 0.0


def valid(point: Point) -> bool:
    """Whether every model answered, and no more than a few requests in a thousand failed."""
    return bool(point.models) and all(
        model.requests > 0 and model.failed <= FAILURES * (model.requests + model.failed)
        for model in point.models.values()
    )


def knows_objectives(point: Point, goals: Goals) -> bool:
    """Whether a point has all figures that are to be good."""
    return not any(
        value_of(objective.metric, point, model, goals.price) is None
        for model, wanted in goals.models.items()
        for objective in wanted.objectives
    )


def excess_known(point: Point, goals: Goals) -> float:
    """By how much the constraints are broken of which it is known, as shares of their bounds."""
    return sum(violation.excess for violation in violations(point, goals) if violation.value is not None)


def unknown(point: Point, goals: Goals) -> list[str]:
    """The figures that goals need and a point has not got, in words."""
    missing = [violation.constraint.metric for violation in violations(point, goals) if violation.value is None]
    return [name.replace("_", " ") for name in dict.fromkeys(missing)]


def violations(point: Point, goals: Goals) -> Iterator[Violation]:
    """The constraints that a point breaks, or of which it is not known whether it does; and as bounds of nothing,
    objectives that are not known."""
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
    """How good a point is beside others, the worst first: whether it keeps the constraints, by how little it breaks
    them (``excess``), and its score."""

    satisfied: bool
    closeness: float
    score: float

    @property
    def excess(self) -> float:
        """By how much the constraints are broken in all, as shares of their bounds."""
        return -self.closeness


def worth(point: Point | None, reference: Point | None, goals: Goals) -> Worth:
    """The worth of a point; of none, the least."""
    if point is None or reference is None:
        return Worth(False, -inf, 0.0)
    over = excess(point, goals)
    return Worth(over == 0.0, -over, score(point, reference, goals))


def satisfied(point: Point, goals: Goals) -> bool:
    """Whether a point is valid and keeps all constraints."""
    return valid(point) and not any(True for _ in violations(point, goals))


def undecided(point: Point, goals: Goals) -> bool:
    """Whether a valid point breaks constraints only by noise, so that another measurement may keep them."""
    broken = list(violations(point, goals)) if valid(point) else []
    return bool(broken) and all(
        violation.value is not None
        and violation.excess <= tolerance(point, violation.model, violation.constraint.metric)
        for violation in broken
    )


def acceptable(point: Point, goals: Goals) -> bool:
    """Whether a point is valid and breaks no constraint by more than noise."""
    return satisfied(point, goals) or undecided(point, goals)


def excess(point: Point, goals: Goals) -> float:
    """By how much the constraints are broken in all, as shares of their bounds; 0 where they are kept."""
    return sum(violation.excess for violation in violations(point, goals)) if valid(point) else inf
