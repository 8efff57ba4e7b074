"""The search strategies full sweep, hill climb and Parzen estimator, and the selection of one by the settings.

Each finder of candidates is a generator of steps; ``Strategy`` runs it, followed by the final rounds. Pure: a strategy
neither measures nor reads a clock, and its choices depend only on the added results. An interrupted search resumes when
the points of its journal are added to a new strategy instead of being measured again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Final, TypeVar

from conch.machine import extras
from conch.measure.analyze.judging.objectives import Worth, valid
from conch.measure.analyze.judging.ranking import FinalRound, FinalRounds, rank
from conch.measure.analyze.options.settings import AnalyzeSettings
from conch.measure.analyze.results import Candidate, CandidateResult, Point, Trial
from conch.measure.analyze.search.axis import LoadClimb, axis_of
from conch.measure.analyze.search.exploration import Exploration
from conch.measure.analyze.search.searches import Search
from conch.measure.analyze.search.space import Choice

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

        If there is no best candidate yet, that of ``trial`` is assumed to become it. The list is empty if there is
        nothing to compare with the default.
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


class Strategy:
    """A search and its final rounds; each trial from ``next`` is followed by one call of ``add``."""

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

    def add(self, trial: Trial, point: Point | None) -> None:
        """Add the point of the current trial; None if its candidate cannot be served or measured, at any load."""
        if trial is not self._trial:
            raise ValueError(f"{trial.candidate.name} at {trial.load:g} was not requested")
        self._done += 1
        self._advance(point)

    @property
    def ahead(self) -> Sequence[Trial]:
        """The measurements that the next one needs to be useful.

        In the search, they include those that would compare its candidate with the default; at the start of a final
        round, they are the whole round. Within a round there are none, as a round is always completed.
        """
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
        """The points of the candidates in the search, the default first; candidates that failed may have none.

        Their configurations are included as far as they are known without a server.
        """
        return self._seen.results

    @property
    def final(self) -> FinalRounds | None:
        """The final rounds so far."""
        return self._finals.result

    def _advance(self, point: Point | None) -> None:
        try:
            self._trial = self._steps.send(point)
        except StopIteration:
            self._trial = None
            if self._steps is self._search:
                self._steps = self._finals.steps()
                self._advance(None)


class FullSweep:
    """Measures all candidates; ``climb`` creates the loads of a candidate."""

    def __init__(self, exploration: Exploration, climb: Callable[[], LoadClimb]) -> None:
        self._seen, self._climb = exploration, climb
        self._swept = 0

    def steps(self) -> Steps:
        """Measure each candidate at all its loads."""
        best: dict[float, Point] = {}
        for candidate in candidates(self._seen):
            loads = self._climb()
            while (load := loads.next()) is not None:
                point = yield from self._seen.measure(candidate, load, rival=best.get(load))
                if point is None:
                    break
                kept = self._seen.keeps(point)
                loads.add(load, point.throughput, kept)
                if kept and (load not in best or point.throughput > best[load].throughput):
                    best[load] = point
            self._swept += 1

    def left(self) -> float:
        """Estimate the remaining measurements: for each candidate left, the average number so far."""
        per_candidate = self._seen.count / self._swept if self._swept else self._seen.climb()
        return per_candidate * max(0, self._seen.space.distinct - self._swept)


def candidates(exploration: Exploration) -> Iterator[Candidate]:
    """Yield each candidate of the space once, the default first."""
    space = exploration.space
    seen = {space.default.name}
    yield space.default
    for choice in space.choices():
        candidate = space.candidate(choice)
        if candidate.name not in seen:
            seen.add(candidate.name)
            yield candidate


# Steps along each dimension double while they improve the result, as in a pattern search (Hooke and Jeeves, 1961). If
# no neighbour is better, the widest unexplored gaps are tried, so that a dip does not end the search. Then one
# dimension is traded for another, for cases such as memory that limits instances and batches together.


#: Lines with at most this many values are tried in full; gaps narrower than this part of a longer line stay.
_FINE: Final = 12


class HillClimb:
    """A climb over the dimensions of a space; the load of each candidate is searched."""

    def __init__(self, exploration: Exploration) -> None:
        self._seen = exploration
        self._home = exploration.space.start
        self._worth = Worth(False, float("-inf"), 0.0)

    def steps(self) -> Steps:
        """Climb until neither a neighbour nor a gap is better."""
        self._worth = yield from self._seen.evaluate(self._seen.space.default)
        yield from self._move(self._home)
        while (yield from self._round()) or (yield from self._gaps()) or (yield from self._diagonals()):
            pass

    def left(self) -> float:
        """Estimate the remaining measurements around the current choice; a better choice has other neighbours."""
        return self._seen.unseen(self._around())

    def _around(self) -> Iterator[Choice]:
        """Yield the choices to try around the current one: along each dimension, and one step up with another down."""
        dimensions = self._seen.space.dimensions
        for axis, dimension in enumerate(dimensions):
            if len(dimension.values) <= _FINE or not dimension.ordered:
                yield from (_at(self._home, axis, index) for index in range(len(dimension.values)))
            else:
                yield from filter(None, (self._shifted(self._home, axis, step) for step in (-1, 1)))
        ordered = [axis for axis, dimension in enumerate(dimensions) if dimension.ordered]
        for up, down in permutations(ordered, 2):
            higher = self._shifted(self._home, up, 1)
            neighbour = self._shifted(higher, down, -1) if higher is not None else None
            if neighbour is not None:
                yield neighbour

    def _round(self) -> Generator[Trial, Point | None, bool]:
        """Climb along each dimension in turn; return whether the result improved."""
        before = self._worth
        for axis, dimension in enumerate(self._seen.space.dimensions):
            yield from self._line(axis) if dimension.ordered else self._try_all(axis)
        return self._worth > before

    def _line(self, axis: int) -> Generator[Trial, Point | None, None]:
        """Step up with doubled steps while that improves the result; otherwise step down."""
        for direction in (1, -1):
            step, moved = 1, False
            while (yield from self._move(self._shifted(self._home, axis, direction * step))):
                step, moved = step * 2, True
            if moved:
                # The last step may have been too large.
                while step > 1:
                    step //= 2
                    yield from self._move(self._shifted(self._home, axis, direction * step))
                return

    def _try_all(self, axis: int) -> Generator[Trial, Point | None, None]:
        for index in range(len(self._seen.space.dimensions[axis].values)):
            yield from self._move(_at(self._home, axis, index))

    def _gaps(self) -> Generator[Trial, Point | None, bool]:
        """Try the skipped values of each dimension; return whether one was better."""
        for axis, dimension in enumerate(self._seen.space.dimensions):
            while dimension.ordered and (index := self._next_gap(axis)) is not None:
                if (yield from self._move(_at(self._home, axis, index))):
                    return True
        return False

    def _next_gap(self, axis: int) -> int | None:
        """Return the next value to try on the line through the current choice; None if the line is known.

        On a short line it is the nearest unknown value, on a long line the one farthest from all known values.
        """
        count = len(self._seen.space.dimensions[axis].values)
        tried = [index for index in range(count) if self._seen.known(_at(self._home, axis, index))]
        distance = {index: min((abs(index - position) for position in tried), default=count) for index in range(count)}
        gaps = [index for index in range(count) if distance[index] > count // _FINE]
        if count <= _FINE:
            return min(gaps, key=lambda index: abs(index - self._home[axis]), default=None)
        return max(gaps, key=lambda index: distance[index], default=None)

    def _diagonals(self) -> Generator[Trial, Point | None, bool]:
        """Raise one dimension and lower another; return whether that was better."""
        ordered = [axis for axis, dimension in enumerate(self._seen.space.dimensions) if dimension.ordered]
        for up, down in permutations(ordered, 2):
            higher = self._shifted(self._home, up, 1)
            neighbour = self._shifted(higher, down, -1) if higher is not None else None
            if (yield from self._move(neighbour)):
                return True
        return False

    def _move(self, choice: Choice | None) -> Generator[Trial, Point | None, bool]:
        """Evaluate a choice, and move to it if it is better."""
        if choice is None:
            return False
        worth = yield from self._seen.evaluate(self._seen.space.candidate(choice))
        if worth <= self._worth:
            return False
        self._home, self._worth = choice, worth
        return True

    def _shifted(self, choice: Choice, axis: int, step: int) -> Choice | None:
        index = choice[axis] + step
        return _at(choice, axis, index) if 0 <= index < len(self._seen.space.dimensions[axis].values) else None


def _at(origin: Choice, axis: int, index: int) -> Choice:
    choice = list(origin)
    choice[axis] = index
    return tuple(choice)


# The seed is fixed, so that a search resumed from the journal makes the same trials.


_SEED: Final = 10
#: Maximum number of successive suggestions of known candidates before the search counts as exhausted.
_REPEATS: Final = 30


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """Minimum and maximum number of candidates, and the number without improvement after which the search ends."""

    minimum: int
    maximum: int
    max_stale: int


class ParzenSearch:
    """An Optuna study over the choices of a space; the load of each candidate is searched."""

    def __init__(self, exploration: Exploration, limits: TrialLimits) -> None:
        """Create the study; raises UNSUPPORTED if Optuna is missing."""
        self._optuna: Any = extras.load("the search mode optuna", "optuna")
        self._seen = exploration
        self._limits = limits
        self._tried = 0

    def steps(self) -> Steps:
        """Try candidates until a limit is reached, or all are known."""
        study = self._study()
        space = self._seen.space
        yield from self._seen.evaluate(space.default)
        best, stale, repeats = self._seen.best_height, 0, 0
        while self._tried < self._limits.maximum and repeats < _REPEATS:
            trial = study.ask()
            candidate, before = space.candidate(self._suggested(trial)), self._seen.count
            yield from self._seen.evaluate(candidate)
            study.tell(trial, self._seen.height(candidate))
            if self._seen.count == before:
                repeats += 1
                continue
            self._tried, repeats = self._tried + 1, 0
            best, stale = max(best, self._seen.best_height), 0 if self._seen.best_height > best else stale + 1
            if self._tried >= self._limits.minimum and stale >= self._limits.max_stale:
                break

    def left(self) -> float:
        """Estimate the remaining trials: up to the middle between the limits."""
        probable = (max(self._limits.minimum, self._tried) + self._limits.maximum) / 2
        return min(probable, self._seen.space.distinct) - self._tried

    def _study(self) -> Any:
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that a multivariate sampler is experimental
            sampler = self._optuna.samplers.TPESampler(seed=_SEED, multivariate=True)
        return self._optuna.create_study(direction="maximize", sampler=sampler)

    def _suggested(self, trial: Any) -> Choice:
        return tuple(self._index(trial, axis) for axis in range(len(self._seen.space.dimensions)))

    def _index(self, trial: Any, axis: int) -> int:
        dimension = self._seen.space.dimensions[axis]
        name = f"{dimension.model} {dimension.name}"
        last = len(dimension.values) - 1
        if dimension.ordered:
            return int(trial.suggest_int(name, 0, last))
        return int(trial.suggest_categorical(name, list(range(last + 1))))


def strategy_of(settings: AnalyzeSettings, search: Search) -> Strategy:
    """Return the strategy that ``run_config_search_mode`` names."""
    axis = axis_of(settings, search.models)
    steps = settings.run_config_search_max_binary_search_steps

    def climb() -> LoadClimb:
        return LoadClimb(axis, steps, early_exit=settings.early_exit_enable)

    exploration = Exploration(search.space, search.goals, axis, steps)
    finder: FullSweep | HillClimb | ParzenSearch
    match settings.run_config_search_mode:
        case "brute":
            finder = FullSweep(exploration, climb)
        case "optuna":
            finder = ParzenSearch(exploration, limits_of(settings, search.space.distinct))
        case "quick":
            finder = HillClimb(exploration)
    return Strategy(exploration, finder.steps(), finder.left, settings.final_rounds)


def limits_of(settings: AnalyzeSettings, size: int) -> TrialLimits:
    """Return the limits of optuna for a space of this size: fractions of the space, within fixed bounds."""
    minimum = max(settings.optuna_min_trials, round(size * settings.optuna_min_percentage_of_search_space / 100))
    maximum = min(settings.optuna_max_trials, round(size * settings.optuna_max_percentage_of_search_space / 100))
    minimum = min(minimum, settings.optuna_max_trials)
    return TrialLimits(minimum, max(minimum, maximum), settings.optuna_early_exit_threshold)
