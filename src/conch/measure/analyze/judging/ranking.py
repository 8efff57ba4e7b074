"""Ranks the configurations, compares the best ones in final rounds, and recommends one.

Pure. Candidates are compared by their best points: points that satisfy the constraints come first, then undisturbed
points, then higher scores. Scores within the noise of the best are tied; of the tied configurations, the simplest wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, inf, sqrt
from typing import Any, Final, Literal

from conch.measure.analyze.judging.goals import Goals
from conch.measure.analyze.judging.objectives import (
    NOISE,
    Violation,
    Worth,
    acceptable,
    pooled,
    score,
    standard_error,
    valid,
    violations,
    worth,
)
from conch.measure.analyze.results import CandidateResult, Point
from conch.measure.perf.figures import Interval, ratio_interval


@dataclass(frozen=True, slots=True)
class Ranked:
    """A ranked candidate with its best point, and the score of that point relative to the default's best point.

    ``violations`` are the constraints that the point violates; ``tied`` is whether its score is within the noise of the
    winner's.
    """

    rank: int
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
    ranked.sort(key=lambda row: _preference(row.point, worth(row.point, reference, goals)), reverse=True)
    tied = _tied(ranked, goals)
    if len(tied) > 1:
        simplest = min(tied, key=_complexity)
        ranked = [simplest, *(row for row in ranked if row is not simplest)]
    names = {row.name for row in tied} if len(tied) > 1 else set()
    rows = tuple(replace(row, rank=position, tied=row.name in names) for position, row in enumerate(ranked, 1))
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
    for model, model_goals in goals.models.items():
        total = sum(objective.weight for objective in model_goals.objectives)
        for objective in model_goals.objectives:
            weight = model_goals.weight * objective.weight / total
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


# Points of a search are minutes apart, and a shared machine becomes faster or slower in that time. The points of one
# round are measured one right after the other, so their ratio is reliable.


#: Number of undisturbed rounds that suffices; with fewer, the disturbed rounds count too.
ENOUGH: Final = 2


@dataclass(frozen=True, slots=True)
class FinalRound:
    """The winner at its best load, and the default at its own best load and, if different, at the winner's."""

    winner: Point
    defaults: tuple[Point, ...]

    @property
    def disturbed(self) -> bool:
        """Whether other processes used the machine during the round."""
        return any(point.disturbed for point in (self.winner, *self.defaults))


@dataclass(frozen=True, slots=True)
class FinalRounds:
    """The rounds of the candidate ``name``, the best one at the end of the search."""

    name: str
    rounds: Sequence[FinalRound]


@dataclass(frozen=True, slots=True)
class DefaultComparison:
    """The ratio of the winner to the default: the mean over the rounds, and its 95 % interval.

    ``interval`` is None for a single round. ``winner`` and ``default`` are the pooled points; the default's is at its
    better load. ``kept``: the winner violates no constraint by more than noise. ``unrivalled``: the default violates
    one by more than noise at every load. ``disturbed``: disturbed rounds are included.
    """

    ratio: float
    interval: Interval | None
    winner: Point
    default: Point
    kept: bool = True
    unrivalled: bool = False
    disturbed: bool = False

    @property
    def better(self) -> bool:
        """Whether the winner is better by more than the noise."""
        return self.kept and self.interval is not None and (self.unrivalled or self.interval.low > 1.0)

    @property
    def worse(self) -> bool:
        """Whether the default is better by more than the noise."""
        return not self.unrivalled and self.interval is not None and self.interval.high < 1.0


def compare(final: FinalRounds | None, ranking: Ranking, goals: Goals) -> DefaultComparison | None:
    """Compare the ranking's winner with the default under ``goals``.

    None if the rounds measured another candidate or load, or if no round has responses on both sides.
    """
    winner = ranking.winner
    if final is None or winner is None or final.name != winner.name:
        return None
    if any(final_round.winner.load != winner.point.load for final_round in final.rounds):
        return None
    quiet = [final_round for final_round in final.rounds if not final_round.disturbed]
    counted = quiet if len(quiet) >= ENOUGH else list(final.rounds)
    counted = [
        final_round
        for final_round in counted
        if all(0.0 < score(final_round.winner, point, goals) < inf for point in final_round.defaults)
    ]
    if not counted:
        return None
    best = pooled([final_round.winner for final_round in counted])
    defaults = [pooled(points) for points in zip(*(final_round.defaults for final_round in counted), strict=True)]
    keeping = [number for number, point in enumerate(defaults) if acceptable(point, goals)]
    rivals = keeping or range(len(defaults))
    rival = min(rivals, key=lambda number: score(best, defaults[number], goals))
    ratio, interval = ratio_interval(
        [score(final_round.winner, final_round.defaults[rival], goals) for final_round in counted]
    )
    default_kept = ranking.default is not None and acceptable(ranking.default.point, goals)
    return DefaultComparison(
        ratio, interval, best, defaults[rival],
        kept=acceptable(best, goals),
        unrivalled=not keeping and not default_kept,
        disturbed=any(final_round.disturbed for final_round in counted),
    )  # fmt: skip


# A configuration is recommended only if it was better than the default in the final rounds.


#: ``use``: the winner is better. ``keep``: the default is as good, or better. ``unproven``: no evidence yet that the
#: winner is better. ``none``: no configuration satisfies the constraints.
Advice = Literal["use", "keep", "unproven", "none"]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The advice with its ranking and comparison.

    ``reason`` is a sentence without a full stop that explains why the winner is not recommended; empty if it is.
    """

    advice: Advice
    ranking: Ranking
    comparison: DefaultComparison | None = None
    reason: str = ""

    @property
    def winner(self) -> Ranked | None:
        """The best candidate of the search, None if no configuration satisfies the constraints."""
        return self.ranking.winner


def recommend(
    results: Sequence[CandidateResult], goals: Goals, final: FinalRounds | None, *, complete: bool
) -> Recommendation:
    """Make the recommendation of a search; ``complete`` is False if it was interrupted."""
    ranking = rank(results, goals)
    comparison = compare(final, ranking, goals)
    advice, reason = _advice(ranking, comparison, complete=complete)
    return Recommendation(advice, ranking, comparison, reason)


def _advice(ranking: Ranking, comparison: DefaultComparison | None, *, complete: bool) -> tuple[Advice, str]:
    winner = ranking.winner
    if winner is None:
        return "none", "no configuration satisfies the constraints"
    if winner is ranking.default:
        if not complete:
            return "unproven", "the search was interrupted"
        if winner.point.disturbed or _limited(winner):
            return "unproven", "other processes used the machine while it was measured"
        return "keep", "the repository's configuration is the best"
    if not complete:
        return "unproven", f"the search was interrupted before {winner.name} was compared with the default"
    if comparison is None:
        return "unproven", f"{winner.name} was not compared with the default in final rounds"
    if comparison.disturbed:
        return "unproven", f"other processes used the machine while {winner.name} was compared with the default"
    if ranking.default is not None and _limited(ranking.default):
        return "unproven", "other processes used the machine during the search for the default's best load"
    if not comparison.kept:
        return "unproven", f"{winner.name} did not satisfy the constraints when it was measured again"
    if comparison.interval is None:
        return "unproven", f"one final round with {winner.name} gives no range (--final-rounds, --budget)"
    if comparison.worse:
        return "keep", f"in the final rounds the default was better than {winner.name}"
    if not comparison.better:
        return "keep", f"in the final rounds {winner.name} was not better than the default by more than the noise"
    return "use", ""


def _limited(default: Ranked) -> bool:
    """Whether measurements above the default's best load were disturbed, so that its true best may be higher."""
    return any(point.disturbed and point.load > default.point.load for point in default.result.points)
