"""From a candidate to what files say."""

from __future__ import annotations

from typing import Any

import pytest

from conch.core.errors import ConchError
from conch.measure.analyze.servers import check_in_force, concise, with_ensembles

GROUP = {"name": "a_0", "kind": "KIND_CPU", "count": 1, "gpus": []}
CONFIGS = {
    "a": {"max_batch_size": 8, "instance_group": [GROUP]},
    "e": {"max_batch_size": 8, "ensemble_scheduling": {"step": [{"model_name": "a"}]}},
}


def test_instance_groups_say_only_what_differs() -> None:
    overrides = {"a": {"max_batch_size": 4, "instance_group": [{**GROUP, "count": 3}, {"count": 1}]}}

    assert concise(overrides, CONFIGS) == {"a": {"max_batch_size": 4, "instance_group": [{"count": 3}, {"count": 1}]}}


def test_an_ensemble_allows_no_larger_batches_than_its_members() -> None:
    assert with_ensembles({"a": {"max_batch_size": 4}}, CONFIGS) == {
        "a": {"max_batch_size": 4},
        "e": {"max_batch_size": 4},
    }
    assert with_ensembles({"a": {"max_batch_size": 16}}, CONFIGS) == {"a": {"max_batch_size": 16}}


def test_what_a_server_adds_by_itself_is_no_candidate() -> None:
    check_in_force({"a": {"dynamic_batching": None}}, CONFIGS)
    with pytest.raises(ConchError, match="'a' has dynamic_batching anyway"):
        check_in_force({"a": {"dynamic_batching": None}}, {"a": {"dynamic_batching": {"preferred_batch_size": [8]}}})


@pytest.mark.parametrize(
    ("overrides", "in_force", "told"),
    [
        ({"max_batch_size": 16}, {"max_batch_size": 8}, "max_batch_size should be 16 but is 8"),
        ({"instance_group": [{"count": 3}]}, {"instance_group": [GROUP]}, "instance_group.count should be 3 but is 1"),
        ({"dynamic_batching": {}}, {}, "dynamic_batching should be set but is not set"),
        (
            {"parameters": {"threads": {"string_value": "2"}}},
            {"parameters": {"threads": {"string_value": "1"}}},
            "parameters.threads.string_value should be 2 but is 1",
        ),
    ],
)
def test_what_a_server_overlooks_is_no_candidate(
    overrides: dict[str, Any], in_force: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConchError, match=told):
        check_in_force({"a": overrides}, {"a": in_force})


def test_what_a_server_completes_is_in_force() -> None:
    wanted = {"instance_group": [{"count": 1}], "dynamic_batching": {"max_queue_delay_microseconds": 100}}
    completed = {"max_queue_delay_microseconds": "100", "preferred_batch_size": [8]}
    check_in_force({"a": wanted}, {"a": {"instance_group": [GROUP], "dynamic_batching": completed}})
