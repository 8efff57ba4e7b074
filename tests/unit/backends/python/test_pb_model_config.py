"""``pb_utils.ModelConfig`` and the functions that look into a configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conch.backends.python import pb_utils
from conch.backends.python.pb_utils import ModelConfig

CONFIG = {
    "name": "m",
    "max_batch_size": 4,
    "input": [
        {"name": "A", "data_type": "TYPE_FP32", "dims": [4], "optional": True},
        {"name": "B", "data_type": "TYPE_INVALID", "dims": []},
    ],
    "output": [{"name": "O", "data_type": "TYPE_FP32", "dims": [4]}],
}


def config(**fields: Any) -> ModelConfig:
    return ModelConfig(json.dumps({**CONFIG, **fields}))


def test_gaps_of_a_configuration_are_filled() -> None:
    helper = config()
    helper.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [4]})
    helper.add_input({"name": "B", "data_type": "TYPE_INT8", "dims": [2], "optional": True})
    helper.add_output({"name": "P", "data_type": "TYPE_INT8", "dims": [1]})
    helper.set_max_batch_size(8)
    helper.set_dynamic_batching()
    helper.set_model_transaction_policy({"decoupled": True})
    assert helper.as_dict() == {
        "name": "m",
        "max_batch_size": 8,
        "input": [
            {"name": "A", "data_type": "TYPE_FP32", "dims": [4], "optional": True},
            {"name": "B", "data_type": "TYPE_INT8", "dims": [2], "optional": True},
        ],
        "output": [*CONFIG["output"], {"name": "P", "data_type": "TYPE_INT8", "dims": [1]}],  # type: ignore[misc]
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": True},
    }


HELPER = "in auto-complete-config function for model 'm'"


@pytest.mark.parametrize(
    ("fields", "call", "message"),
    [
        (
            {},
            lambda c: c.set_max_batch_size(2),
            "configuration specified max_batch_size 4, but in auto-complete-config function for model 'm' specified "
            "max_batch_size 2",
        ),
        (
            {"sequence_batching": {}},
            lambda c: c.set_dynamic_batching(),
            "Configuration specified scheduling_choice as 'sequence_batching', but auto-complete-config function for "
            "model 'm' tries to set scheduling_choice as 'dynamic_batching'",
        ),
        (
            {},
            lambda c: c.add_input({"name": "A", "data_type": "TYPE_INT8", "dims": [4]}),
            "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'A', "
            "model provides TYPE_INT8",
        ),
        (
            {},
            lambda c: c.add_output({"name": "O", "data_type": "TYPE_FP32", "dims": [5]}),
            "model 'm', tensor 'O': the model expects dims [5] but the model configuration specifies dims [4]",
        ),
        (
            {},
            lambda c: c.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [4], "optional": False}),
            "model 'm', tensor 'A': the model expects optional False but the model configuration specifies "
            "optional True",
        ),
        (
            {},
            lambda c: c.add_input({"name": "A", "data_type": "TYPE_FP32", "dims": [4], "x": 1}),
            f"input 'A' {HELPER} contains property other than 'name', 'data_type', 'dims' and 'optional'.",
        ),
        (
            {},
            lambda c: c.add_output({"name": "O", "data_type": "TYPE_FP32", "dims": [4], "optional": True}),
            f"output 'O' {HELPER} contains property other than 'name', 'data_type' and 'dims'.",
        ),
        (
            {},
            lambda c: c.add_input({"data_type": "TYPE_FP32", "dims": [4]}),
            f"input {HELPER} is missing 'name' property.",
        ),
        (
            {},
            lambda c: c.add_output({"name": "Z", "dims": [4]}),
            f"output 'Z' {HELPER} is missing 'data_type' property.",
        ),
        (
            {},
            lambda c: c.set_model_transaction_policy({"x": 1}),
            f"model transaction property {HELPER} contains property other than 'decoupled'.",
        ),
        (
            {"model_transaction_policy": {"decoupled": False}},
            lambda c: c.set_model_transaction_policy({"decoupled": True}),
            "trying to change decoupled property in auto-complete-config for model 'm', "
            "which is already set to 'False'.",
        ),
    ],
)
def test_contradiction_of_a_configuration_is_refused(fields: dict[str, Any], call: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        call(config(**fields))
    assert str(raised.value) == message


def test_configuration_is_looked_into_by_name() -> None:
    assert pb_utils.get_input_config_by_name(CONFIG, "A") == CONFIG["input"][0]  # type: ignore[index]
    assert pb_utils.get_output_config_by_name(CONFIG, "A") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(CONFIG)
    assert pb_utils.using_decoupled_model_transaction_policy({"model_transaction_policy": {"decoupled": True}})
