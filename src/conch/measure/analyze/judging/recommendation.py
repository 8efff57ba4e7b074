"""The recommendation of a search: use the winner, or keep the repository's configuration.

Pure. A configuration is recommended only if it was better than the default in the final rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from conch.measure.analyze.judging.goals import Goals
from conch.measure.analyze.judging.ranking import Ranked, Ranking, rank
from conch.measure.analyze.judging.rounds import DefaultComparison, FinalRounds, compare
from conch.measure.analyze.results import CandidateResult

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
        return "none", "no configuration keeps the constraints"
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
        return "unproven", f"{winner.name} did not keep the constraints when it was measured again"
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
