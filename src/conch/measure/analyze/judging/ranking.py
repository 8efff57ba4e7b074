"""Ranks the configurations.

Pure. Candidates are compared by their best points: points that satisfy the constraints come first, then undisturbed
points, then higher scores. Scores within the noise of the best are tied; of the tied configurations, the simplest wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, sqrt
from typing import Any

from conch.measure.analyze.judging.goals import Goals
from conch.measure.analyze.judging.noise import NOISE, standard_error
from conch.measure.analyze.judging.objectives import Violation, Worth, valid, violations, worth
from conch.measure.analyze.results import CandidateResult, Point


@dataclass(frozen=True, slots=True)
class Ranked:
    """A ranked candidate with its best point, and the score of that point relative to the default's best point.

    ``violations`` are the constraints that the point violates; ``tied`` is whether its score is within the noise of the
    winner's.
    """

    place: int
    result: CandidateResult
    point: Point
    score: float
    violations: tuple[Violation, ...] = ()
    tied: bool = False

    @property
    def name(self) -> str:
        """The candidate's name."""
        return self.result.candidate.name

    @property
    def satisfied(self) -> bool:
        """Whether the best point is valid and satisfies the constraints."""
        return valid(self.point) and not self.violations


@dataclass(frozen=True, slots=True)
class Ranking:
    """All measured candidates, the best first; ``winner`` is None if none satisfies the constraints.

    ``cautions`` are sentences with doubts about the ranking that its rows do not show.
    """

    rows: tuple[Ranked, ...]
    winner: Ranked | None
    default: Ranked | None
    cautions: tuple[str, ...] = ()


def rank(results: Sequence[CandidateResult], goals: Goals) -> Ranking:
    """Rank the results; without any valid point, the ranking has no rows."""
    reference = _reference(results, goals)
    if reference is None:
        return Ranking((), None, None)
    ranked = [_ranked(result, reference, goals) for result in results if result.points]
    ranked.sort(key=lambda row: _order(row, reference, goals), reverse=True)
    tied = _tied(ranked, goals)
    if len(tied) > 1:
        simplest = min(tied, key=_complexity)
        ranked = [simplest, *(row for row in ranked if row is not simplest)]
    names = {row.name for row in tied} if len(tied) > 1 else set()
    rows = tuple(replace(row, place=place, tied=row.name in names) for place, row in enumerate(ranked, 1))
    winner = rows[0] if rows[0].satisfied else None
    default = next((row for row in rows if row.result.candidate.is_default), None)
    return Ranking(rows, winner, default, tuple(_cautions(rows, winner)))


def best_point(result: CandidateResult, reference: Point, goals: Goals) -> Point:
    """Return the best point of a candidate; undisturbed points are preferred among equally valid ones."""
    return max(result.points, key=lambda point: _preference(point, worth(point, reference, goals)))


def _reference(results: Sequence[CandidateResult], goals: Goals) -> Point | None:
    """Return the best point of the default, or else of another candidate; None if no point is valid."""
    for candidates in ([result for result in results if result.candidate.is_default], results):
        points = [point for candidate in candidates for point in candidate.points if valid(point)]
        if points:
            return max(points, key=lambda point: _preference(point, worth(point, points[0], goals)))
    return None


def _preference(point: Point, judged: Worth) -> tuple[bool, bool, float, float]:
    return judged.satisfied, not point.disturbed, judged.closeness, judged.score


def _ranked(result: CandidateResult, reference: Point, goals: Goals) -> Ranked:
    point = best_point(result, reference, goals)
    return Ranked(0, result, point, worth(point, reference, goals).score, tuple(violations(point, goals)))


def _order(row: Ranked, reference: Point, goals: Goals) -> tuple[bool, bool, float, float]:
    return _preference(row.point, worth(row.point, reference, goals))


def _tied(rows: Sequence[Ranked], goals: Goals) -> list[Ranked]:
    """Return the rows at the top whose scores differ only by noise."""
    first = rows[0]
    if not first.satisfied:
        return []
    return [
        row
        for row in rows
        if row.satisfied
        and row.point.disturbed == first.point.disturbed
        and row.score * (1 + _uncertainty(row.point, first.point, goals)) >= first.score
    ]


def _uncertainty(first: Point, other: Point, goals: Goals) -> float:
    """Return the relative difference of two scores that noise explains: two standard errors of their difference."""
    variance, weights = 0.0, 0.0
    for model, wanted in goals.models.items():
        total = sum(objective.weight for objective in wanted.objectives)
        for objective in wanted.objectives:
            weight = wanted.weight * objective.weight / total
            noise = hypot(*(standard_error(point, model, objective.metric) for point in (first, other)))
            variance, weights = variance + (weight * noise) ** 2, weights + weight
    return max(NOISE, 2 * sqrt(variance) / weights)


def _complexity(row: Ranked) -> tuple[int, int, int, str]:
    """Return the sort key of a configuration's complexity: instances, memory, number of overrides."""
    models = {*row.point.models, *row.result.configs, *row.result.candidate.overrides}
    instances = sum(_instances(row.result, model) for model in models)
    memory = row.point.resources.memory + row.point.resources.gpu_memory if row.point.resources is not None else 0
    # Rounded to 64 MB, because measured memory always varies a little.
    return instances, round(memory / 64e6), _leaves(row.result.candidate.overrides), row.name


def _instances(result: CandidateResult, model: str) -> int:
    config = {**result.configs.get(model, {}), **result.candidate.overrides.get(model, {})}
    groups = config.get("instance_group") or [{}]
    return sum(int(group.get("count", 1)) * max(1, len(group.get("gpus") or ())) for group in groups)


def _leaves(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_leaves(element) for element in value.values())
    if isinstance(value, list | tuple):
        return sum(_leaves(element) for element in value)
    return 1


def _cautions(rows: Sequence[Ranked], winner: Ranked | None) -> Iterator[str]:
    """Yield doubts: better but disturbed candidates, and a winner with few measurements."""
    if winner is None:
        return
    if winner.point.stopped:
        yield (
            f"The measurement of {winner.name} ended early, because another configuration was better under the goals of"
            " the analysis: run 'conch analyze profile' with these goals."
        )
    if winner.point.disturbed:
        return
    better = [row for row in rows if row.point.disturbed and row.satisfied and row.score > winner.score * (1 + NOISE)]
    if better:
        yield (
            f"{better[0].name} may be better than {winner.name}, but its measurement was disturbed: measure it again"
            " (--repeat-disturbed)."
        )
