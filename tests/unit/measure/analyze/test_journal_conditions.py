"""What makes a point of a journal another question."""

from __future__ import annotations

from typing import Any

import pytest

from conch.measure.analyze.journal import conditions
from conch.measure.analyze.options.settings import AnalyzeSettings, models

CONFIGS = {"m": {"max_batch_size": 8}}


@pytest.mark.parametrize(
    "changes",
    [
        {"request_rate_search_enable": True},
        {"profile_models": models("profile_models", {"m": {"parameters": {"request_rate": 16}}})},
        {"batch_sizes": (4,)},
        {"client_protocol": "http"},
    ],
)
def test_another_way_of_asking_is_another_condition(changes: dict[str, Any]) -> None:
    now = AnalyzeSettings(profile_models=models("profile_models", "m"))
    assert conditions(now, None, CONFIGS) != conditions(
        AnalyzeSettings(**{"profile_models": now.profile_models, **changes}), None, CONFIGS
    )


def test_goals_and_the_way_of_searching_are_none() -> None:
    models_ = models("profile_models", "m")
    searched = AnalyzeSettings(profile_models=models_, run_config_search_mode="brute", latency_budget=0.1)
    assert conditions(AnalyzeSettings(profile_models=models_), None, CONFIGS) == conditions(searched, None, CONFIGS)
