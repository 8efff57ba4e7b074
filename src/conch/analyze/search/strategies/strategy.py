"""What every search strategy does: it asks for one measurement after another, and learns what came out.

Pure: a strategy neither measures nor looks at a clock, and what it asks next follows from what it was told alone.  So
an interrupted search goes on by telling a new strategy the points of the checkpoint instead of measuring them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from conch.analyze.judging.rounds import FinalRounds
from conch.analyze.results import Candidate, CandidateResult, Point


class Trial(NamedTuple):
    """A measurement to make: a candidate at a load.

    ``rival`` is the point that it has to beat, where it is of use only as a winner: then measuring may end early
    (:mod:`conch.analyze.judging.pruning`).  Without one it is to be measured to the end.  A trial that comes again is
    measured again.  ``finalist`` is the candidate of the final rounds that a trial is part of; None in the search.
    """

    candidate: Candidate
    load: float
    rival: Point | None = None
    finalist: Candidate | None = None


class Strategy(Protocol):
    """A search and its final rounds.  Every ``next`` that returned a trial is followed by one ``add`` or ``fail``."""

    def next(self) -> Trial | None:
        """The measurement to make now; None when all is measured."""
        ...

    def add(self, trial: Trial, point: Point) -> None:
        """Learn what the trial measured."""
        ...

    def fail(self, trial: Trial) -> None:
        """Learn that the trial's candidate cannot be served or measured; no other load of it is asked for."""
        ...

    @property
    def ahead(self) -> Sequence[Trial]:
        """The measurements that have to be made for the next one to be of use: in the search also those that would
        compare its candidate with the default, at the beginning of a final round the whole round, and within one
        nothing, because what has begun is finished."""
        ...

    def end_phase(self) -> None:
        """End the search, and continue with the final rounds of the best candidate so far; end those if they have
        begun."""
        ...

    @property
    def expected(self) -> int:
        """The estimated total of measurements in the search and its final rounds."""
        ...

    @property
    def results(self) -> Sequence[CandidateResult]:
        """What the candidates measured in the search, the default first; those that could not be measured have no
        points.  Their configurations are as far as they are known without a server."""
        ...

    @property
    def final(self) -> FinalRounds | None:
        """The final rounds so far; None where there are none."""
        ...
