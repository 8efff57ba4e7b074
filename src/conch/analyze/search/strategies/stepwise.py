"""Lets a search be written as one function that measures where it needs to: a generator, driven as a strategy."""

from __future__ import annotations

from collections.abc import Callable, Generator

from conch.analyze.results import Point
from conch.analyze.search.strategies.strategy import Trial

#: Yields what to measure, and is sent what came out; None where the candidate cannot be served or measured.
Steps = Generator[Trial, Point | None, None]


class Stepwise:
    """A strategy (:class:`conch.analyze.search.strategies.strategy.Strategy`) of the steps of a generator."""

    def __init__(self, steps: Steps, left: Callable[[], float]) -> None:
        """``left`` estimates how many measurements are still to come."""
        self._steps = steps
        self._left = left
        self._trial: Trial | None = None
        self._done = 0
        self._ended = False

    def next(self) -> Trial | None:
        """The measurement to make now; the same until it is answered, None at the end."""
        if self._trial is None and not self._ended and not self._done:
            self._advance(None)
        return self._trial

    def add(self, trial: Trial, point: Point) -> None:
        """Learn what the trial measured."""
        self._answer(trial, point)

    def fail(self, trial: Trial) -> None:
        """Learn that its candidate cannot be served or measured."""
        self._answer(trial, None)

    @property
    def expected(self) -> int:
        """The measurements so far, and those that are probably still to come."""
        return self._done + (0 if self._ended else max(1, round(self._left())))

    def _answer(self, trial: Trial, point: Point | None) -> None:
        if trial is not self._trial:
            raise ValueError(f"{trial.candidate.name} at {trial.load:g} was not asked for")
        self._done += 1
        self._advance(point)

    def _advance(self, point: Point | None) -> None:
        try:
            self._trial = self._steps.send(point)
        except StopIteration:
            self._trial, self._ended = None, True
