"""The configuration as JSON: what the real Triton 2.51 printed for the same configurations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conch.config.pbtxt import parse
from conch.config.render import from_json, to_json
from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError

TENSOR = '"is_shape_tensor":false,"allow_ragged_batch":false,"optional":false,"is_non_linear_format_io":false'
PLAIN = (
    '{"name":"plain","platform":"","backend":"python","runtime":"","version_policy":{"latest":{"num_versions":1}},'
    '"max_batch_size":0,"input":[{"name":"A","data_type":"TYPE_FP32","format":"FORMAT_NONE","dims":[-1,4],'
    + TENSOR
    + '}],"output":[{"name":"B","data_type":"TYPE_STRING","dims":[1,2],"reshape":{"shape":[2]},"label_filename":"",'
    '"is_shape_tensor":false,"is_non_linear_format_io":false}],"batch_input":[],"batch_output":[],"optimization":'
    '{"priority":"PRIORITY_DEFAULT","input_pinned_memory":{"enable":true},"output_pinned_memory":{"enable":true},'
    '"gather_kernel_buffer_threshold":0,"eager_batching":false},"instance_group":[{"name":"plain","kind":"KIND_CPU",'
    '"count":1,"gpus":[],"secondary_devices":[],"profile":[],"passive":false,"host_policy":""}],'
    '"default_model_filename":"model.py","cc_model_filenames":{},"metric_tags":{},"parameters":{},"model_warmup":[]}'
)


def shown(config: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(to_json(config))
    return values


def render(text: str) -> dict[str, Any]:
    return shown(parse(text, "config.pbtxt"))


def test_effective_configuration_prints_as_triton_prints_it() -> None:
    assert to_json(from_json(PLAIN)) == PLAIN


def test_empty_configuration_prints_every_field_but_messages() -> None:
    assert list(render("")) == [
        *("name", "platform", "backend", "runtime", "max_batch_size", "input", "output", "batch_input"),
        *("batch_output", "instance_group", "default_model_filename", "cc_model_filenames", "metric_tags"),
        *("parameters", "model_warmup"),
    ]


def test_listed_64_bit_integers_are_numbers_and_the_others_strings() -> None:
    shown = render("""
        version_policy { specific { versions: [3] } }
        dynamic_batching {
          max_queue_delay_microseconds: 7 priority_levels: 2 default_priority_level: 1
          default_queue_policy { default_timeout_microseconds: 5 }
          priority_queue_policy { key: 2 value { default_timeout_microseconds: 6 } }
        }
        optimization { cuda { graph_spec { batch_size: 1 input { key: "A" value { dim: [1, 2] } } } } }
        instance_group { secondary_devices { device_id: 4 } }
        model_warmup { inputs { key: "A" value { dims: [8] zero_data: true } } }
    """)

    assert shown["version_policy"] == {"specific": {"versions": [3]}}
    batching = shown["dynamic_batching"]
    assert (batching["max_queue_delay_microseconds"], batching["priority_levels"]) == (7, 2)
    assert batching["default_queue_policy"]["default_timeout_microseconds"] == 5
    assert batching["priority_queue_policy"]["2"]["default_timeout_microseconds"] == 6
    assert shown["optimization"]["cuda"]["graph_spec"][0]["input"] == {"A": {"dim": ["1", "2"]}}
    assert shown["instance_group"][0]["secondary_devices"][0]["device_id"] == "4"
    assert shown["model_warmup"][0]["inputs"]["A"]["dims"] == [8]


def test_sequence_model_prints_states_and_controls_as_triton_does() -> None:
    shown = render("""
        sequence_batching {
          direct { max_queue_delay_microseconds: 9 minimum_slot_utilization: 0.3 }
          control_input { name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
          state { input_name: "i" output_name: "o" data_type: TYPE_INT32 dims: [2]
                  initial_state { name: "z" data_type: TYPE_INT32 dims: [2] zero_data: true } }
        }
    """)["sequence_batching"]

    assert json.dumps(shown, separators=(",", ":")) == (
        '{"direct":{"max_queue_delay_microseconds":9,"minimum_slot_utilization":0.3},"max_sequence_idle_microseconds":0,'
        '"control_input":[{"name":"S","control":[{"kind":"CONTROL_SEQUENCE_START","int32_false_true":[0,1],'
        '"fp32_false_true":[],"bool_false_true":[],"data_type":"TYPE_INVALID"}]}],"state":[{"input_name":"i",'
        '"output_name":"o","data_type":"TYPE_INT32","dims":[2],"initial_state":[{"data_type":"TYPE_INT32",'
        '"dims":["2"],"name":"z","zero_data":true}],"use_same_buffer_for_input_output":false,'
        '"use_growable_memory":false}],"iterative_sequence":false}'
    )


@pytest.mark.parametrize(
    ("written", "shown"), [("1", 1), ("0.5", 0.5), ("0.123456789", 0.123456791), ("0.3", 0.3), ("1e30", 1e30)]
)
def test_floats_print_without_the_noise_of_32_bits(written: str, shown: float) -> None:
    text = f"sequence_batching {{ direct {{ minimum_slot_utilization: {written} }} }}"

    assert repr(render(text)["sequence_batching"]["direct"]["minimum_slot_utilization"]) == repr(shown)


def test_fields_newer_than_the_baseline_print_only_when_set() -> None:
    assert "max_inflight_requests" not in render("ensemble_scheduling {}")["ensemble_scheduling"]
    assert (
        render("ensemble_scheduling { max_inflight_requests: 2 }")["ensemble_scheduling"]["max_inflight_requests"] == 2
    )
    assert "model_metrics" not in render("")


def test_override_takes_enum_values_in_any_case() -> None:
    config = from_json(
        '{"maxBatchSize": 3, "input": [{"data_type": "type_fp32"}], "instance_group": [{"kind": "kind_cpu"}],'
        '"dynamic_batching": {"priority_queue_policy": {"1": {"timeout_action": "delay"}}}}'
    )

    assert config.max_batch_size == 3
    values = shown(config)
    assert values["input"][0]["data_type"] == "TYPE_FP32"
    assert values["instance_group"][0]["kind"] == "KIND_CPU"
    assert values["dynamic_batching"]["priority_queue_policy"]["1"]["timeout_action"] == "DELAY"


def test_override_keeps_the_case_of_strings() -> None:
    assert from_json('{"parameters": {"aB": {"string_value": "cD"}}}').parameters["aB"].string_value == "cD"


@pytest.mark.parametrize(
    "text",
    [
        *("", "not json", "[]", "3", "null", '{"nam": 1}', '{"max_batch_size": "x"}', '{"input": 3}'),
        *('{"input": [{"data_type": "TYPE_FP99"}]}', '{"batch_input": [{"kind": Infinity}]}', '{"parameters": 3}'),
        '{"instance_group": [{"kind": 77}]}',
        *("[" * 100_000, '{"a":' * 2_000),
    ],
)
def test_override_that_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(ConchError, match=r"^Invalid config override: ") as caught:
        from_json(text)
    assert caught.value.code is Code.INTERNAL


def test_rendering_and_reading_give_the_same_configuration() -> None:
    config = parse('name: "ü\\n\\"" max_batch_size: 2 parameters { key: "k" value { string_value: "<a/b>" } }', "c")

    assert from_json(to_json(config)) == config
