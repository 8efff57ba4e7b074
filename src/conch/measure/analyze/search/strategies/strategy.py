"""The interface of search strategies, which choose one measurement after another from the results so far.

Pure: a strategy neither measures nor reads a clock, and its choices depend only on the added results. An interrupted
search resumes when the points of its journal are added to a new strategy instead of being measured again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from conch.measure.analyze.judging.rounds import FinalRounds
from conch.measure.analyze.results import Candidate, CandidateResult, Point


class Trial(NamedTuple):
    """A measurement to make: a candidate at a load.

    ``rival`` is the point to beat if only a winner is of use; the measurement may then end early
    (:mod:`conch.measure.analyze.judging.pruning`). Without a rival it is completed. A repeated trial is measured again.
    ``finalist`` is the candidate of the final rounds that the trial belongs to; None in the search.
    """

    candidate: Candidate
    load: float
    rival: Point | None = None
    finalist: Candidate | None = None


class Strategy(Protocol):
    """A search and its final rounds; each trial from ``next`` is followed by one call of ``add`` or ``fail``."""

    def next(self) -> Trial | None:
        """Return the next trial; None when the search and the rounds are complete."""
        ...

    def add(self, trial: Trial, point: Point) -> None:
        """Add the point of a trial."""
        ...

    def fail(self, trial: Trial) -> None:
        """Record that the trial's candidate cannot be served or measured; its other loads are skipped."""
        ...

    @property
    def ahead(self) -> Sequence[Trial]:
        """The measurements that the next one needs to be useful.

        In the search, they include those that would compare its candidate with the default; at the start of a final
        round, they are the whole round. Within a round there are none, as a round is always completed.
        """
        ...

    def end_phase(self) -> None:
        """End the search and continue with the final rounds of the best candidate; end those if they have begun."""
        ...

    @property
    def expected(self) -> int:
        """The estimated total of measurements in the search and its final rounds."""
        ...

    @property
    def results(self) -> Sequence[CandidateResult]:
        """The points of the candidates in the search, the default first; candidates that failed may have none.

        Their configurations are included as far as they are known without a server.
        """
        ...

    @property
    def final(self) -> FinalRounds | None:
        """The final rounds so far; None if there are none."""
        ...
