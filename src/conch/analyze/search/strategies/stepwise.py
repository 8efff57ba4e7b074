"""Lets a search be written as one function that measures where it needs to: a generator, driven as a strategy."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from conch.analyze.judging.rounds import FinalRounds
from conch.analyze.results import CandidateResult, Point
from conch.analyze.search.strategies.exploration import Exploration
from conch.analyze.search.strategies.finals import FinalSteps
from conch.analyze.search.strategies.strategy import Trial

#: Yields what to measure, and is sent what came out; None where the candidate cannot be served or measured.
Steps = Generator[Trial, Point | None, None]


class Stepwise:
    """A strategy (:class:`conch.analyze.search.strategies.strategy.Strategy`): the steps of a search, then those of the
    final rounds."""

    def __init__(self, exploration: Exploration, search: Steps, left: Callable[[], float], rounds: int) -> None:
        """``left`` estimates how many measurements of the search are still to come; ``rounds`` are final ones."""
        self._seen, self._search, self._left = exploration, search, left
        self._finals = FinalSteps(exploration, rounds)
        self._steps: Steps = search
        self._trial: Trial | None = None
        self._done = 0
        self._begun = False

    def next(self) -> Trial | None:
        """The measurement to make now; the same until it is answered, None at the end."""
        if not self._begun:
            self._begun = True
            self._advance(None)
        return self._trial

    def add(self, trial: Trial, point: Point) -> None:
        """Learn what the trial measured."""
        self._answer(trial, point)

    def fail(self, trial: Trial) -> None:
        """Learn that its candidate cannot be served or measured."""
        self._answer(trial, None)

    @property
    def ahead(self) -> Sequence[Trial]:
        """The measurements that have to be made for the next one to be of use."""
        trial = self.next()
        if trial is None:
            return ()
        if self._steps is self._search:
            return (trial, *self._finals.after(trial))
        return self._finals.beginning or ((trial,) if trial.finalist is None else ())

    def end_phase(self) -> None:
        """End the search, and continue with the final rounds; end those if they have begun."""
        self._begun = True
        self._steps.close()
        if self._steps is self._search:
            self._advance(None)
        else:
            self._trial = None

    @property
    def expected(self) -> int:
        """The measurements so far, and those that are probably still to come."""
        searching = self._steps is self._search
        left = max(1, round(self._left())) + self._finals.most if searching else self._finals.left
        return self._done + left

    @property
    def results(self) -> Sequence[CandidateResult]:
        """What the candidates measured in the search; those that could not be measured have no points."""
        return self._seen.results

    @property
    def final(self) -> FinalRounds | None:
        """The final rounds so far."""
        return self._finals.found

    def _answer(self, trial: Trial, point: Point | None) -> None:
        if trial is not self._trial:
            raise ValueError(f"{trial.candidate.name} at {trial.load:g} was not asked for")
        self._done += 1
        self._advance(point)

    def _advance(self, point: Point | None) -> None:
        try:
            self._trial = self._steps.send(point)
        except StopIteration:
            self._trial = None
            if self._steps is self._search:
                self._steps = self._finals.steps()
                self._advance(None)
