"""The final rounds: the winner of a search and the default, measured in alternation, and their comparison.

Pure.  Points of a search are minutes apart, and a shared machine becomes faster or slower in that time.  The points of
one round are measured one right after the other, so their ratio is reliable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from conch.measure.analyze.judging.goals import Goals
from conch.measure.analyze.judging.noise import pooled
from conch.measure.analyze.judging.objectives import acceptable, score
from conch.measure.analyze.judging.ranking import Ranking
from conch.measure.analyze.results import Point
from conch.measure.perf.figures.confidence import Interval, ratio_interval

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
