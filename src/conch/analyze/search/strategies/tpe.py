"""The search of Optuna: a tree-structured Parzen estimator, which tries more of what was good.

Its seed is fixed, so that a search asks for the same when it goes on from a checkpoint.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Final

from conch import extras
from conch.analyze.search.space import Choice
from conch.analyze.search.strategies.exploration import Exploration
from conch.analyze.search.strategies.stepwise import Steps

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
