"""The strategy of a search, chosen once."""

from __future__ import annotations

from conch.analyze.options.settings import AnalyzeSettings
from conch.analyze.search.axis import axis_of
from conch.analyze.search.searches import Search
from conch.analyze.search.strategies.brute import FullSweep
from conch.analyze.search.strategies.exploration import Exploration
from conch.analyze.search.strategies.loads import LoadClimb
from conch.analyze.search.strategies.quick import HillClimb
from conch.analyze.search.strategies.stepwise import Stepwise
from conch.analyze.search.strategies.strategy import Strategy
from conch.analyze.search.strategies.tpe import ParzenSearch, TrialLimits


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
