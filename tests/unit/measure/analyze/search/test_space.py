"""The search space: its candidates are valid configurations, and none comes twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conch.config.validate import validate_load
from conch.core.errors import ConchError
from conch.measure.analyze.options.settings import AnalyzeSettings, models
from conch.measure.analyze.search.searches import Search, dimensions_of, searches
from conch.measure.analyze.search.space import ModelFacts, SearchSpace, key, merged, message
from tests.unit.measure.analyze.configs import batching_model


def space_for(settings: AnalyzeSettings, **changes: object) -> SearchSpace:
    facts = ModelFacts("m", batching_model(**changes), threads=4)
    return SearchSpace("m", tuple(dimensions_of(settings, facts)), {"m": facts})


def test_every_candidate_is_a_valid_configuration() -> None:
    space = space_for(AnalyzeSettings(run_config_search_max_instance_count=2, run_config_search_max_model_batch_size=8))
    candidates = {candidate.name: candidate for candidate in map(space.candidate, space.choices())}
    assert len(candidates) > 10
    for candidate in candidates.values():
        config = merged(space.configs["m"], candidate.overrides.get("m", {}))
        validate_load(message(config))


def test_choices_that_do_the_same_are_one_candidate() -> None:
    space = space_for(AnalyzeSettings(sweep=("batch", "delay")))
    unbatched = {space.candidate(choice).name for choice in space.choices() if choice[0] == 0}
    assert len(unbatched) == 1


def test_the_repositorys_own_configuration_is_the_default_candidate() -> None:
    space = space_for(AnalyzeSettings())
    assert space.candidate(space.start) == space.default


def test_what_a_server_completes_makes_no_other_candidate() -> None:
    completed = {"preferred_batch_size": [8], "max_queue_delay_microseconds": 0}
    space = space_for(AnalyzeSettings(sweep=("batch",)), dynamic_batching=completed)
    batches = space.dimensions[0].values

    assert space.candidate((batches.index(8),)) == space.default
    assert space.candidate((batches.index(16),)).overrides["m"]["max_batch_size"] == 16


def search_for(settings: AnalyzeSettings, **changes: object) -> Search:
    (search,) = searches(settings, {"m": ModelFacts("m", batching_model(**changes), threads=4)})
    return search


def swept(**config: Any) -> AnalyzeSettings:
    """A full sweep of the fields of ``model_config_parameters``."""
    return AnalyzeSettings(
        run_config_search_mode="brute",
        profile_models=models("profile_models", {"m": {"model_config_parameters": config}}),
    )


def configs(search: Search) -> list[dict[str, Any]]:
    """The overrides of all candidates, once each."""
    found = [search.space.candidate(choice).overrides.get("m", {}) for choice in search.space.choices()]
    return [dict(one) for index, one in enumerate(found) if one not in found[:index]]


def test_fields_that_are_named_are_swept_and_no_others() -> None:
    search = search_for(
        swept(
            max_batch_size=[6, 4],
            dynamic_batching={"max_queue_delay_microseconds": [200, 400], "preferred_batch_size": [[2], [2, 4]]},
            parameters={"threads": [1, 2], "engine": {"string_value": "onnxruntime"}},
        )
    )
    found = configs(search)
    assert len(found) == 2 * 2 * 2 * 2
    assert {
        "max_batch_size": 4,
        "dynamic_batching": {"max_queue_delay_microseconds": 200, "preferred_batch_size": [2, 4]},
        "parameters": {"threads": {"string_value": "1"}, "engine": {"string_value": "onnxruntime"}},
    } in found


def test_an_instance_group_is_a_list_and_its_fields_are_swept() -> None:
    search = search_for(swept(instance_group=[{"kind": "KIND_CPU", "count": [1, 2, 3]}]))
    assert configs(search) == [  # one instance is what the repository has
        {},
        {"instance_group": [{"kind": "KIND_CPU", "count": 2}]},
        {"instance_group": [{"kind": "KIND_CPU", "count": 3}]},
    ]
    search = search_for(
        swept(instance_group=[[{"kind": "KIND_CPU", "count": 3}], [{"kind": "KIND_CPU"}, {"count": 1}]])
    )
    assert [len(config["instance_group"]) for config in configs(search)] == [1, 2]


def test_climbing_adds_what_is_not_named() -> None:
    chosen = AnalyzeSettings(
        profile_models=models("profile_models", {"m": {"model_config_parameters": {"max_batch_size": [2, 4]}}})
    )
    names = [dimension.name for dimension in search_for(chosen).space.dimensions]
    assert names[0] == "max_batch_size" and names.count("max_batch_size") == 1
    assert "instance_group.count" in names


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_batchsize": 4}, "unknown field 'max_batchsize'; did you mean 'max_batch_size'?"),
        ({"instance_group": [{"cuont": 4}]}, "unknown field 'cuont'; did you mean 'count'?"),
        ({"dynamic_batching": {"max_queue_delay_microseconds": ["soon"]}}, "not a model configuration"),
        ({"max_batch_size": []}, "there are 0 values to try"),
    ],
)
def test_a_field_that_configurations_have_not_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConchError) as caught:
        search_for(swept(**config))
    assert message in caught.value.message


def test_a_model_without_batches_gets_none() -> None:
    settings = AnalyzeSettings(profile_models=models("profile_models", "m"))
    plain = search_for(settings, max_batch_size=0, dynamic_batching=None)
    assert {dimension.name for dimension in plain.space.dimensions} == {
        "instance_group.count",
        "parameters.intra_op_thread_count",
    }
    others: list[dict[str, Any]] = [
        {"sequence_batching": {"oldest": {}}},
        {"model_transaction_policy": {"decoupled": True}},
    ]
    for changes in others:
        search = search_for(settings, dynamic_batching=None, **changes)
        assert "max_batch_size" not in {dimension.name for dimension in search.space.dimensions}


def test_batches_are_tried_with_dynamic_batching() -> None:
    settings = AnalyzeSettings(profile_models=models("profile_models", "m"), sweep=("batch",))
    found = configs(search_for(settings, dynamic_batching=None))
    assert {"max_batch_size": 64, "dynamic_batching": {}} in found
    assert {"dynamic_batching": {}} in found


def test_variants_of_a_converted_checkpoint_are_tried_and_its_own_choice_is_the_default() -> None:
    config = batching_model(backend="huggingface", platform="")
    facts = ModelFacts("m", config, variants=("torch-fp32", "openvino-int8"), auto="openvino-int8")
    (search,) = searches(
        AnalyzeSettings(profile_models=models("profile_models", "m"), sweep=("variant",)), {"m": facts}
    )
    assert search.space.candidate(search.space.start) == search.space.default
    assert [one["parameters"] for one in configs(search) if one] == [{"variant": {"string_value": "torch-fp32"}}]


def test_requests_fit_into_every_batch() -> None:
    chosen = AnalyzeSettings(profile_models=models("profile_models", "m"), sweep=("batch",), batch_sizes=(3,))
    assert [dimension.values for dimension in search_for(chosen).space.dimensions] == [(3, 6, 12, 24, 48, 96)]


def test_all_candidates_stay_on_the_cpu_where_that_is_wanted() -> None:
    chosen = AnalyzeSettings(profile_models=models("profile_models", {"m": {"cpu_only": True}}), sweep=("instances",))
    search = search_for(chosen, instance_group=[{"kind": "KIND_GPU", "count": 1, "gpus": [0]}])
    groups = [config["instance_group"] for config in configs(search)]
    assert [[(group["kind"], group["count"]) for group in one] for one in groups] == [
        [("KIND_CPU", n)] for n in range(1, 6)
    ]
    assert search.space.default.is_default and search.space.default.overrides


def test_steps_of_an_ensemble_have_dimensions_of_their_own() -> None:
    ensemble = {
        "name": "e",
        "platform": "ensemble",
        "max_batch_size": 8,
        "ensemble_scheduling": {"step": [{"model_name": "a"}, {"model_name": "b"}]},
    }
    facts = {"e": ModelFacts("e", ensemble)}
    facts |= {name: ModelFacts(name, batching_model(name)) for name in "ab"}
    chosen = AnalyzeSettings(profile_models=models("profile_models", "e"), sweep=("instances", "batch"))
    (search,) = searches(chosen, facts)
    assert [dimension.model for dimension in search.space.dimensions] == ["a", "a", "b", "b"]
    assert search.models == ("e",)


def test_models_are_searched_together_or_one_after_the_other() -> None:
    facts = {name: ModelFacts(name, batching_model(name)) for name in "ab"}
    apart = searches(AnalyzeSettings(profile_models=models("profile_models", "a,b")), facts)
    assert [one.models for one in apart] == [("a",), ("b",)]
    together = AnalyzeSettings(
        profile_models=models("profile_models", "a,b"), run_config_profile_models_concurrently_enable=True
    )
    (search,) = searches(together, facts)
    assert search.name == "a+b"
    assert {dimension.model for dimension in search.space.dimensions} == {"a", "b"}


def test_a_model_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConchError, match="there is no model 'x'; the models are m"):
        searches(
            AnalyzeSettings(profile_models=models("profile_models", "x")), {"m": ModelFacts("m", batching_model())}
        )


@pytest.mark.long
@settings(max_examples=30)
@given(
    max_batch_size=st.integers(0, 64),
    delay=st.none() | st.integers(0, 5000),
    preferred=st.lists(st.integers(1, 8), max_size=3),
    count=st.integers(1, 9),
    largest=st.integers(1, 64),
    named=st.booleans(),
)
def test_whatever_the_configuration_its_candidates_are_valid_and_none_has_two_names(
    max_batch_size: int, delay: int | None, preferred: list[int], count: int, largest: int, named: bool
) -> None:
    batching: dict[str, Any] | None = None
    if delay is not None and max_batch_size:
        batching = {"max_queue_delay_microseconds": delay}
        batching |= {"preferred_batch_size": [one for one in preferred if one <= max_batch_size]}
    config = batching_model(
        max_batch_size=max_batch_size, dynamic_batching=batching, instance_group=[{"kind": "KIND_CPU", "count": count}]
    )
    said = {"model_config_parameters": {"dynamic_batching": {"preferred_batch_size": [[4], [8]]}}} if named else None
    chosen = AnalyzeSettings(
        profile_models=models("profile_models", {"m": said}),
        run_config_search_max_instance_count=2, run_config_search_max_model_batch_size=largest,
    )  # fmt: skip
    if max_batch_size < 8 and named:
        return  # the user's sizes do not fit the user's batches
    (search,) = searches(chosen, {"m": ModelFacts("m", config, threads=2)})
    names: dict[str, str] = {}
    for choice in search.space.choices():
        candidate = search.space.candidate(choice)
        merged_config = merged(config, candidate.overrides.get("m", {}))
        validate_load(message(merged_config))
        assert names.setdefault(key(merged_config), candidate.name) == candidate.name


def test_a_model_without_dynamic_batching_is_measured_once_whatever_its_batches() -> None:
    settings = AnalyzeSettings(
        sweep=("batch", "delay"), profile_models=models("profile_models", "m"), run_config_search_max_model_batch_size=8
    )
    space = search_for(settings).space
    off = [choice for choice in space.choices() if space.dimensions[1].values[choice[1]] == "off"]
    assert len(off) == 4 and len({space.candidate(choice).name for choice in off}) == 1
    assert space.size == 4 * 5 and space.distinct == 1 + 3 * 4, "not batched; batches of 2, 4 and 8 with each delay"
