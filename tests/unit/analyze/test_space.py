"""The search space: its candidates are valid configurations, and none comes twice."""

from __future__ import annotations

from conch.analyze.automatic import dimensions_of
from conch.analyze.facts import ModelFacts
from conch.analyze.overrides import merged, message
from conch.analyze.settings import AnalyzeSettings
from conch.analyze.space import SearchSpace
from conch.config.validate import validate_load
from tests.unit.analyze.configs import batching_model


def space_for(settings: AnalyzeSettings, **changes: object) -> SearchSpace:
    config = batching_model(**changes)
    facts = ModelFacts("m", config, threads=4)
    return SearchSpace("m", tuple(dimensions_of(settings, facts)), {"m": config})


def test_every_candidate_is_a_valid_configuration() -> None:
    space = space_for(AnalyzeSettings(run_config_search_max_instance_count=2, run_config_search_max_model_batch_size=8))
    for choice in space.choices():
        candidate = space.candidate(choice)
        config = merged(space.configs["m"], candidate.overrides.get("m", {}))
        validate_load(message(config))


def test_choices_that_do_the_same_are_one_candidate() -> None:
    space = space_for(AnalyzeSettings(sweep=("batch", "delay")))
    unbatched = {space.candidate(choice).name for choice in space.choices() if choice[0] == 0}
    assert len(unbatched) == 1


def test_the_repositorys_own_configuration_is_the_default_candidate() -> None:
    space = space_for(AnalyzeSettings())
    assert space.candidate(space.start) == space.default
