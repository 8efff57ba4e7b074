"""Runs a search written as a generator function as a strategy, followed by the final rounds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Final, TypeVar

from conch.measure.analyze.judging.objectives import valid
from conch.measure.analyze.judging.ranking import FinalRound, FinalRounds, rank
from conch.measure.analyze.results import Candidate, CandidateResult, Point
from conch.measure.analyze.search.strategies.exploration import Exploration
from conch.measure.analyze.search.strategies.strategy import Trial

# The default is measured again at higher loads before the rounds, and at the winner's load in them, because other
# processes may have hidden its best load at the start of the search. The winner's point is measured again because the
# best of many is partly luck.


#: Maximum number of best points that are measured again.
_LEADERS: Final = 4
#: Typical number of measurements before the rounds.
_BEFORE: Final = 3

_T = TypeVar("_T")


class FinalSteps:
    """The final rounds: ``rounds`` rounds of the best candidate of a search and the default."""

    def __init__(self, exploration: Exploration, rounds: int) -> None:
        self._seen, self._rounds = exploration, rounds
        self._left = self.expected_count
        self.result: FinalRounds | None = None
        #: The round that the next measurement begins; empty before the rounds and within a round.
        self.beginning: list[Trial] = []

    @property
    def expected_count(self) -> int:
        """The estimated number of measurements of the rounds."""
        return 3 * self._rounds + _BEFORE if self._rounds else 0

    @property
    def left(self) -> int:
        """The number of remaining measurements of the rounds."""
        return self._left

    def after(self, trial: Trial) -> list[Trial]:
        """Return the probable measurements of the final rounds if the search ends after ``trial``.

        Its candidate may then be the best one. The list is empty if no candidate could be compared with the default.
        """
        trials = self._trials()
        if not trials and not trial.candidate.is_default:
            default = rank(self._seen.results, self._seen.goals).default
            if default is not None and default.satisfied:
                trials = _round(trial.candidate, trial.load, self._seen.space.default, default.point.load)
        if not trials or not self._rounds:
            return []
        winner, *defaults = trials
        return [
            *[defaults[-1]] * (_BEFORE - 1),
            winner,
            *(trial for n in range(self._rounds) for trial in _turned(trials, n)),
        ]

    def steps(self) -> Generator[Trial, Point | None, None]:
        """Measure the rounds, every second one in reverse order; stop at the first failure."""
        if not self._rounds:
            return
        yield from self._confirm()
        trials = self._trials()
        self._left = self._rounds * len(trials)
        for number in range(self._rounds if trials else 0):
            points: list[Point] = []
            self.beginning = _turned(trials, number)
            for trial in _turned(trials, number):
                point = yield trial
                self.beginning = []
                self._left -= 1
                if point is None:
                    self._left = 0
                    return
                points.append(point)
            winner, *defaults = _turned(points, number)
            before = self.result.rounds if self.result is not None else ()
            self.result = FinalRounds(trials[0].candidate.name, (*before, FinalRound(winner, tuple(defaults))))

    def _confirm(self) -> Generator[Trial, Point | None, None]:
        """Measure the loads above the default's best, and the winner's point, again.

        Ends when the current winner has been measured twice.
        """
        if self._trials():
            yield from self._seen.look_higher(self._seen.space.default)
        confirmed = set()
        for _ in range(_LEADERS):
            trials = self._trials()
            if not trials or (trials[0].candidate.name, trials[0].load) in confirmed:
                return
            confirmed.add((trials[0].candidate.name, trials[0].load))
            yield from self._seen.confirm(trials[0].candidate, trials[0].load)

    def _trials(self) -> list[Trial]:
        """Return a round: the winner, and the default at its best load and at the winner's."""
        ranking = rank(self._seen.results, self._seen.goals)
        winner, default = ranking.winner, ranking.default
        if winner is None or default is None or winner is default or not valid(default.point):
            return []
        return _round(winner.result.candidate, winner.point.load, self._seen.space.default, default.point.load)


def _round(finalist: Candidate, load: float, default: Candidate, own: float) -> list[Trial]:
    """Return a round: the finalist at its load, and the default at its own load and at the finalist's."""
    return [
        Trial(finalist, load, finalist=finalist),
        *(Trial(default, tried, finalist=finalist) for tried in dict.fromkeys((own, load))),
    ]


def _turned(of_round: Sequence[_T], number: int) -> list[_T]:
    """Return the items of a round in the order of round ``number``: every second one is reversed."""
    return list(of_round if number % 2 == 0 else reversed(of_round))


#: Yields trials, and receives their points; None if the candidate cannot be served or measured.
Steps = Generator[Trial, Point | None, None]


class Stepwise:
    """A strategy (:class:`conch.measure.analyze.search.strategies.strategy.Strategy`) of a search and its final
    rounds."""

    def __init__(self, exploration: Exploration, search: Steps, left: Callable[[], float], rounds: int) -> None:
        """Create the strategy.

        ``left`` estimates the remaining measurements of the search; ``rounds`` is the number of final rounds.
        """
        self._seen, self._search, self._left = exploration, search, left
        self._finals = FinalSteps(exploration, rounds)
        self._steps: Steps = search
        self._trial: Trial | None = None
        self._done = 0
        self._started = False

    def next(self) -> Trial | None:
        """Return the current trial, until its result is added; None at the end."""
        if not self._started:
            self._started = True
            self._advance(None)
        return self._trial

    def add(self, trial: Trial, point: Point) -> None:
        """Add the point of the current trial."""
        self._record(trial, point)

    def fail(self, trial: Trial) -> None:
        """Record that the candidate of the trial cannot be served or measured."""
        self._record(trial, None)

    @property
    def ahead(self) -> Sequence[Trial]:
        """The measurements that the next one needs to be useful."""
        trial = self.next()
        if trial is None:
            return ()
        if self._steps is self._search:
            return (trial, *self._finals.after(trial))
        return self._finals.beginning or ((trial,) if trial.finalist is None else ())

    def end_phase(self) -> None:
        """End the search, and continue with the final rounds; end those if they have begun."""
        self._started = True
        self._steps.close()
        if self._steps is self._search:
            self._advance(None)
        else:
            self._trial = None

    @property
    def expected(self) -> int:
        """The number of measurements so far, and the estimated number of remaining ones."""
        searching = self._steps is self._search
        left = max(1, round(self._left())) + self._finals.expected_count if searching else self._finals.left
        return self._done + left

    @property
    def results(self) -> Sequence[CandidateResult]:
        """The points of the candidates in the search; candidates that could not be measured have none."""
        return self._seen.results

    @property
    def final(self) -> FinalRounds | None:
        """The final rounds so far."""
        return self._finals.result

    def _record(self, trial: Trial, point: Point | None) -> None:
        if trial is not self._trial:
            raise ValueError(f"{trial.candidate.name} at {trial.load:g} was not requested")
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
