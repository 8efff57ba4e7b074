"""What every search strategy does: it asks for one measurement after another, and learns what came out.

Pure: a strategy neither measures nor looks at a clock, and what it asks next follows from what it was told alone.  So
an interrupted search goes on by telling a new strategy the points of the checkpoint instead of measuring them again.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from conch.analyze.results import Candidate, Point


class Trial(NamedTuple):
    """A measurement to make: a candidate at a load.

    ``rival`` is the point that it has to beat, where it is of use only as a winner: then measuring may end early
    (:mod:`conch.analyze.judging.pruning`).  Without one it is to be measured to the end.
    """

    candidate: Candidate
    load: float
    rival: Point | None = None


class Strategy(Protocol):
    """A search.  Every ``next`` that returned a trial is followed by one ``add`` or ``fail`` for it."""

    def next(self) -> Trial | None:
        """The measurement to make now; None when the search has ended.  No trial comes twice."""
        ...

    def add(self, trial: Trial, point: Point) -> None:
        """Learn what the trial measured."""
        ...

    def fail(self, trial: Trial) -> None:
        """Learn that the trial's candidate cannot be served or measured; no other load of it is asked for."""
        ...

    @property
    def expected(self) -> int:
        """How many measurements the whole search will have taken, as far as can be told now."""
        ...
