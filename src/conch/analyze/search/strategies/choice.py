"""The strategy of a search, chosen once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Final

from conch import extras
from conch.analyze.judging.objectives import Worth
from conch.analyze.options.settings import AnalyzeSettings
from conch.analyze.results import Candidate, Point
from conch.analyze.search.axis import axis_of
from conch.analyze.search.searches import Search
from conch.analyze.search.space import Choice
from conch.analyze.search.strategies.exploration import Exploration
from conch.analyze.search.strategies.loads import LoadClimb
from conch.analyze.search.strategies.stepwise import Steps, Stepwise
from conch.analyze.search.strategies.strategy import Strategy, Trial


class FullSweep:
    """Measures all; ``climb`` makes the loads of one candidate."""

    def __init__(self, exploration: Exploration, climb: Callable[[], LoadClimb]) -> None:
        self._seen, self._climb = exploration, climb
        self._swept = 0

    def steps(self) -> Steps:
        """Measure one candidate after the other, each at all its loads."""
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
        """For each candidate left as many measurements as the others took on average."""
        each = self._seen.count / self._swept if self._swept else self._seen.climb()
        return each * max(0, self._seen.space.distinct - self._swept)


def candidates(exploration: Exploration) -> Iterator[Candidate]:
    """All candidates of the space once, the default first."""
    space = exploration.space
    seen = {space.default.name}
    yield space.default
    for choice in space.choices():
        candidate = space.candidate(choice)
        if candidate.name not in seen:
            seen.add(candidate.name)
            yield candidate


# Pure. Along each dimension steps double while they help, as in a pattern search (Hooke and Jeeves, 1961). Where no
# neighbour is better, the widest gaps that nobody has looked into are tried, so that a dip is not taken for the end,
# and one dimension is traded for another, as where memory bounds instances and batches together.


#: A line with at most so many values is tried in full; of a longer one, gaps narrower than this part of it stay.
_FINE: Final = 12


class HillClimb:
    """One climb over the dimensions of a space; the load follows from the candidate."""

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
        """What is to be looked at around home until nothing is better; a better home has other neighbours."""
        return self._seen.unseen(self._around())

    def _around(self) -> Iterator[Choice]:
        """The places that are tried while home stays: along each dimension, and one step up and another down."""
        dimensions = self._seen.space.dimensions
        for axis, dimension in enumerate(dimensions):
            if len(dimension.values) <= _FINE or not dimension.ordered:
                yield from (_at(self._home, axis, index) for index in range(len(dimension.values)))
            else:
                yield from filter(None, (self._shifted(self._home, axis, step) for step in (-1, 1)))
        ordered = [axis for axis, one in enumerate(dimensions) if one.ordered]
        for up, down in permutations(ordered, 2):
            higher = self._shifted(self._home, up, 1)
            place = self._shifted(higher, down, -1) if higher is not None else None
            if place is not None:
                yield place

    def _round(self) -> Generator[Trial, Point | None, bool]:
        """Climb along each dimension in turn; whether anything was better."""
        before = self._worth
        for axis, dimension in enumerate(self._seen.space.dimensions):
            yield from self._line(axis) if dimension.ordered else self._try_all(axis)
        return self._worth > before

    def _line(self, axis: int) -> Generator[Trial, Point | None, None]:
        """Step up while that helps, twice as far each time; down where it does not."""
        for direction in (1, -1):
            step, moved = 1, False
            while (yield from self._move(self._shifted(self._home, axis, direction * step))):
                step, moved = step * 2, True
            if moved:
                # The last step may have gone too far.
                while step > 1:
                    step //= 2
                    yield from self._move(self._shifted(self._home, axis, direction * step))
                return

    def _try_all(self, axis: int) -> Generator[Trial, Point | None, None]:
        for index in range(len(self._seen.space.dimensions[axis].values)):
            yield from self._move(_at(self._home, axis, index))

    def _gaps(self) -> Generator[Trial, Point | None, bool]:
        """Try the skipped values of each dimension; whether one was better."""
        for axis, dimension in enumerate(self._seen.space.dimensions):
            while dimension.ordered and (index := self._next_gap(axis)) is not None:
                if (yield from self._move(_at(self._home, axis, index))):
                    return True
        return False

    def _next_gap(self, axis: int) -> int | None:
        """The next value to look at on the line through home: of a short line the nearest one that is not known, of a
        long one the farthest from all that are; None where the line is known."""
        count = len(self._seen.space.dimensions[axis].values)
        tried = [index for index in range(count) if self._seen.known(_at(self._home, axis, index))]
        distance = {index: min((abs(index - one) for one in tried), default=count) for index in range(count)}
        gaps = [index for index in range(count) if distance[index] > count // _FINE]
        if count <= _FINE:
            return min(gaps, key=lambda index: abs(index - self._home[axis]), default=None)
        return max(gaps, key=lambda index: distance[index], default=None)

    def _diagonals(self) -> Generator[Trial, Point | None, bool]:
        """Raise one dimension and lower another; whether that was better."""
        ordered = [axis for axis, dimension in enumerate(self._seen.space.dimensions) if dimension.ordered]
        for up, down in permutations(ordered, 2):
            higher = self._shifted(self._home, up, 1)
            place = self._shifted(higher, down, -1) if higher is not None else None
            if (yield from self._move(place)):
                return True
        return False

    def _move(self, place: Choice | None) -> Generator[Trial, Point | None, bool]:
        """Look at a place and go there if it is better."""
        if place is None:
            return False
        found = yield from self._seen.evaluate(self._seen.space.candidate(place))
        if found <= self._worth:
            return False
        self._home, self._worth = place, found
        return True

    def _shifted(self, place: Choice, axis: int, step: int) -> Choice | None:
        index = place[axis] + step
        return _at(place, axis, index) if 0 <= index < len(self._seen.space.dimensions[axis].values) else None


def _at(place: Choice, axis: int, index: int) -> Choice:
    choice = list(place)
    choice[axis] = index
    return tuple(choice)


# Its seed is fixed, so that a search asks for the same when it goes on from a checkpoint.


_SEED: Final = 10
#: How often the sampler may name a known candidate in a row before the space counts as exhausted around the best.
_REPEATS: Final = 30


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """How many candidates are tried at least and at most, and after how many without a better one the search ends."""

    least: int
    most: int
    patience: int


class ParzenSearch:
    """One study over the choices of a space; the load follows from the candidate."""

    def __init__(self, exploration: Exploration, limits: TrialLimits) -> None:
        """Raises UNSUPPORTED where Optuna is missing."""
        self._optuna: Any = extras.load("the search mode optuna", "optuna")
        self._seen = exploration
        self._limits = limits
        self._tried = 0

    def steps(self) -> Steps:
        """Try candidates until the limits are reached, or all are known."""
        study = self._study()
        space = self._seen.space
        yield from self._seen.evaluate(space.default)
        best, stale, repeats = self._seen.best_height, 0, 0
        while self._tried < self._limits.most and repeats < _REPEATS:
            trial = study.ask()
            candidate, before = space.candidate(self._suggested(trial)), self._seen.count
            yield from self._seen.evaluate(candidate)
            study.tell(trial, self._seen.height(candidate))
            if self._seen.count == before:
                repeats += 1
                continue
            self._tried, repeats = self._tried + 1, 0
            best, stale = max(best, self._seen.best_height), 0 if self._seen.best_height > best else stale + 1
            if self._tried >= self._limits.least and stale >= self._limits.patience:
                break

    def left(self) -> float:
        """The trials that are probably still to come: halfway between the limits."""
        probable = (max(self._limits.least, self._tried) + self._limits.most) / 2
        return min(probable, self._seen.space.distinct) - self._tried

    def _study(self) -> Any:
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a multivariate sampler is experimental
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
    """The strategy that ``run_config_search_mode`` names."""
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
    return Stepwise(exploration, finder.steps(), finder.left, settings.final_rounds)


def limits_of(settings: AnalyzeSettings, size: int) -> TrialLimits:
    """How many candidates of a space of this size optuna tries: shares of the space, within numbers."""
    least = max(settings.optuna_min_trials, round(size * settings.optuna_min_percentage_of_search_space / 100))
    most = min(settings.optuna_max_trials, round(size * settings.optuna_max_percentage_of_search_space / 100))
    least = min(least, settings.optuna_max_trials)
    return TrialLimits(least, max(least, most), settings.optuna_early_exit_threshold)
