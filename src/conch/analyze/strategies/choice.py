"""The strategy of a search, chosen once."""

from __future__ import annotations

from conch.analyze.goals import Goals
from conch.analyze.settings import AnalyzeSettings
from conch.analyze.space import SearchSpace
from conch.analyze.strategies.brute import Brute
from conch.analyze.strategies.loads import LoadClimb
from conch.analyze.strategies.strategy import Strategy


def strategy_of(settings: AnalyzeSettings, space: SearchSpace, goals: Goals) -> Strategy:
    """The strategy that ``run_config_search_mode`` names."""

    def loads() -> LoadClimb:
        if settings.loads_are_rates:
            least, most = settings.run_config_search_min_request_rate, settings.run_config_search_max_request_rate
            return LoadClimb(least, most, settings.run_config_search_max_binary_search_steps, settings.request_rate)
        return LoadClimb(
            settings.run_config_search_min_concurrency,
            settings.run_config_search_max_concurrency,
            settings.run_config_search_max_binary_search_steps,
            settings.concurrency,
        )

    return Brute(space, goals, loads)
