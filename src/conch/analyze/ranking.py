"""Which configuration is best, and how sure that is.

Pure.  Candidates are compared by the best of their points: one that keeps the constraints before one that does not,
one that nobody disturbed before one that somebody did, then by score.  Scores within the noise of the winner's are
tied, and the simplest of those configurations wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from conch.analyze.goals import Goals
from conch.analyze.objectives import Violation, excess, satisfied, score, valid, violations
from conch.analyze.results import CandidateResult, Point

#: Scores that differ by less than this share are tied where nothing says how precise they are.
NOISE: Final = 0.03


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate at its place: its best point (None: it has none), and the score of that beside the default's best.

    ``tied`` says that its score is within the noise of the winner's.
    """

    place: int
    result: CandidateResult
    point: Point | None
    score: float
    violations: tuple[Violation, ...] = ()
    tied: bool = False

    @property
    def satisfied(self) -> bool:
        """Whether its best point is valid and keeps the constraints."""
        return self.point is not None and valid(self.point) and not self.violations


@dataclass(frozen=True, slots=True)
class Ranking:
    """All candidates, the best first; ``winner`` is None where none keeps the constraints.

    ``notes`` are sentences about what casts doubt on it, or why there is no winner.
    """

    rows: tuple[Ranked, ...]
    winner: Ranked | None
    default: Ranked | None
    notes: tuple[str, ...] = ()


def rank(results: Sequence[CandidateResult], goals: Goals, *, noise: float = NOISE) -> Ranking:
    """The ranking of what was measured; the first result is the default's."""
    points = [point for one in results for point in one.points if valid(point)]
    own = [point for point in results[0].points if valid(point)] if results else []
    if not points:
        return Ranking((), None, None, ("No candidate was measured: there is no valid point.",))

    reference = (own or points)[0]

    def worth(point: Point) -> tuple[bool, bool, float, float]:
        return (
            satisfied(point, goals), not point.disturbed, -excess(point, goals), score(point, reference, goals)
        )  # fmt: skip

    best = {one.candidate.name: max(one.points, key=worth, default=None) for one in results}
    ordered = sorted(
        (one for one in results if best[one.candidate.name] is not None),
        key=lambda one: worth(best[one.candidate.name]),  # type: ignore[arg-type]
        reverse=True,
    )
    base = best[results[0].candidate.name] or reference
    rows = []
    for place, one in enumerate(ordered, 1):
        point = best[one.candidate.name]
        assert point is not None
        rows.append(Ranked(place, one, point, score(point, base, goals), tuple(violations(point, goals))))
    winner = rows[0] if rows and rows[0].satisfied else None
    default = next((row for row in rows if not row.result.candidate.overrides), None)
    return Ranking(tuple(rows), winner, default)
