"""What is refused, in which words: each message, and each acceptance, was seen on the real Triton 2.51."""

from __future__ import annotations

import pytest

from conch.config.complete import complete
from conch.config.pbtxt import locate, parse
from conch.config.reading import Problem, refuse
from conch.config.schema import ModelConfig
from conch.config.validate import (
    check_directory_name,
    static_problems,
    validate,
    validate_instances,
    validate_io,
    validate_load,
    validate_states,
    warmup_problems,
    warmup_size_problem,
)
from conch.core.errors import Code

A = 'input { name: "A" data_type: TYPE_FP32 dims: 4 }\n'
B = 'output { name: "B" data_type: TYPE_FP32 dims: 4 }\n'
ANY_VALUE = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"


def completed(text: str, gpus: tuple[int, ...] = ()) -> ModelConfig:
    return complete(parse(text, "config.pbtxt"), "m", {"model.py"}, gpus=gpus)


def dynamic(text: str, max_batch_size: int = 4) -> str:
    return f"max_batch_size: {max_batch_size} dynamic_batching {{ {text} }}"


def sequence(text: str, max_batch_size: int = 4) -> str:
    return f"max_batch_size: {max_batch_size} sequence_batching {{ {text} }}"


def control(text: str) -> str:
    return sequence(f'control_input {{ name: "S" control {{ {text} }} }}')


def tensor(text: str) -> str:
    return f'input {{ name: "A" data_type: TYPE_FP32 {text} }}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
        ('platform: "foo"', "unexpected platform type 'foo' for m"),
        ('default_model_filename: "other.py"', "unexpected platform type '' for m"),
        ('platform: "tensorrt_plan" backend: "onnxruntime"',
         "unexpected 'platform' and 'backend' pair, got:tensorrt_plan, onnxruntime"),
        (dynamic("preferred_batch_size: 0"), "dynamic batching preferred size must be positive for m"),
        (dynamic("preferred_batch_size: -1"), "dynamic batching preferred size must be positive for m"),
        (dynamic("preferred_batch_size: 9"), "dynamic batching preferred size must be <= max batch size for m"),
        (dynamic("preferred_batch_size: 1", 0), "dynamic batching preferred size must be <= max batch size for m"),
        (dynamic("priority_levels: 3"), "default priority level must be in range [1, 3] for m"),
        (dynamic("priority_levels: 3 default_priority_level: 4"),
         "default priority level must be in range [1, 3] for m"),
        (dynamic("priority_levels: 3 default_priority_level: 1 priority_queue_policy { key: 4 value {} }"),
         "priority queue policy must have priority level in range [1, 3] for m"),
        (dynamic("priority_levels: 3 default_priority_level: 1 priority_queue_policy { key: 0 value {} }"),
         "priority queue policy must have priority level in range [1, 3] for m"),
        (dynamic("priority_levels: 3 default_priority_level: 1 preserve_ordering: true"),
         "Only one priority level is allowed when 'preserve_ordering' is true for m"),
        (dynamic("preserve_ordering: true "
                 "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 }"),
         "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m"),
        (dynamic("preserve_ordering: true priority_levels: 1 default_priority_level: 1 priority_queue_policy "
                 "{ key: 1 value { timeout_action: DELAY default_timeout_microseconds: 5 } }"),
         "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m"),
        (sequence("control_input { control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }"),
         "sequence batching control tensor must have a name for m"),
        (sequence('control_input [{ name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } },'
                  '{ name: "S" control { kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] } }]'),
         "sequence batching control tensor 'S' is specified for multiple control kinds for m"),
        (sequence('control_input [{ name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } },'
                  '{ name: "T" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }]'),
         "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m"),
        (control("kind: CONTROL_SEQUENCE_READY"),
         f"sequence batching must specify either {ANY_VALUE} for CONTROL_SEQUENCE_READY for m"),
        (control("kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] fp32_false_true: [0, 1]"),
         "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' "
         "for CONTROL_SEQUENCE_END for m"),
        (control("kind: CONTROL_SEQUENCE_END int32_false_true: [0]"),
         "sequence batching control 'int32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_END for m"),
        (control("kind: CONTROL_SEQUENCE_END bool_false_true: [true]"),
         "sequence batching control 'bool_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_END for m"),
        (control("kind: CONTROL_SEQUENCE_CORRID int32_false_true: [0, 1] data_type: TYPE_INT32"),
         f"sequence batching must not specify either {ANY_VALUE} for CONTROL_SEQUENCE_CORRID for m"),
        (control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32"),
         "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
         "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"),
        (sequence("oldest { preferred_batch_size: 0 }"),
         "sequence batching preferred batch size must be positive for m"),
        (sequence("oldest { preferred_batch_size: 5 }"),
         "sequence batching preferred batch size must be <= max batch size for m"),
        (sequence("direct { minimum_slot_utilization: 1.5 }"),
         "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m"),
        (sequence("") + " response_cache { enable: true }",
         "Response Cache does not currently support model m with sequence batching scheduler. "
         "Please disable the response cache."),
        ("response_cache { enable: true } model_transaction_policy { decoupled: true }",
         "Response Cache does not currently support model m with 'decoupled' transaction policy. "
         "Please disable the response cache."),
        ("model_metrics { metric_control {} }", "metric control must specify 'metric_identifier'"),
        ("model_metrics { metric_control { metric_identifier {} } }",
         "metric identifier must specify non-empty 'family'"),
        ('model_metrics { metric_control { metric_identifier { family: "f" } } }',
         "metric control must specify 'histogram_options'"),
        ('model_metrics { metric_control { metric_identifier { family: "f" } histogram_options {} } }',
         "histogram options must specify non-empty 'buckets'"),
    ],
)  # fmt: skip
def test_model_is_refused_when_it_is_read(text: str, message: str) -> None:
    with pytest.raises(Problem) as caught:
        validate(completed(text))
    assert (caught.value.message, caught.value.code) == (message, Code.INVALID_ARG)


@pytest.mark.parametrize(
    "text",
    [
        dynamic("", 0),
        dynamic("default_priority_level: 4"),
        dynamic("priority_queue_policy { key: 4 value {} }"),
        dynamic("preserve_ordering: true priority_levels: 1 default_priority_level: 1"),
        dynamic("preserve_ordering: true default_queue_policy { timeout_action: DELAY }"),
        sequence('control_input { name: "S" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] },'
                 "{ kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] }] }"),
        sequence("direct { minimum_slot_utilization: 0 }"),
        sequence('control_input { name: "S" }'),
        'platform: "foo" backend: "python"',
        'platform: "torch_aoti" backend: "pytorch"',
        "response_cache { enable: false } model_transaction_policy { decoupled: true }",
    ],
)  # fmt: skip
def test_what_triton_accepts_is_accepted(text: str) -> None:
    validate_load(completed(A + B + text))


def test_configuration_without_a_name_or_version_policy_is_refused() -> None:
    messages = [problem.message for problem in static_problems(parse('backend: "python"', "c"))]

    assert messages == ["model configuration must specify 'name'", "must specify 'version policy' for "]


def test_directory_must_have_the_models_name() -> None:
    check_directory_name(parse("", "c"), "m")
    check_directory_name(parse('name: "m"', "c"), "m")
    with pytest.raises(Problem) as caught:
        check_directory_name(parse('name: "other"', "c"), "m")
    assert caught.value.message == (
        "unexpected directory name 'm' for model 'other', directory name must equal model name"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input { data_type: TYPE_FP32 dims: 1 }", "model input must specify 'name' for m"),
        ('input { name: "A" dims: 1 }', "model input 'A' must specify 'data_type' for m"),
        (tensor(""), "model input 'A' must specify 'dims' for m"),
        (tensor("dims: 0"),
         "model input 'A' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m"),
        (tensor("dims: 1 reshape { shape: 0 }"),
         "model input 'A' reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for m"),
        (tensor("dims: 1 reshape {}"),
         "model input 'A' cannot have empty reshape for non-batching model as scalar tensors are not supported for m"),
        (tensor("dims: 2 reshape {}") + " max_batch_size: 2",
         "model input 'A' has different size for dims and reshape for m"),
        (tensor("dims: 4 reshape { shape: [2, 3] }"), "model input 'A' has different size for dims and reshape for m"),
        (tensor("dims: [4, -1, 3] reshape { shape: [3, -1, 4] }"),
         "model input 'A' has different size for dims and reshape for m"),
        (tensor("dims: [-1, -1] reshape { shape: [-1] }"),
         "model input 'A' has different number of variable-size dimensions for dims and reshape for m"),
        (tensor("dims: [1, 2] format: FORMAT_NHWC"), "model input NHWC/NCHW require 3 dims for m"),
        (tensor("dims: 1 is_shape_tensor: true"), "shape tensors are only supported for TensorRT platform for m"),
        (tensor("dims: 1 is_non_linear_format_io: true"),
         "Non-linear IO format is only supported for the TensorRT platform for m"),
        (A + "output { data_type: TYPE_FP32 dims: 1 }", "model output must specify 'name' for m"),
        (A + 'output { name: "B" data_type: TYPE_FP32 dims: 0 }',
         "model output 'B' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m"),
        (A + B + "batch_input { kind: BATCH_ELEMENT_COUNT data_type: TYPE_FP32 }",
         "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0 for m"),
        (A + B + 'batch_input { data_type: TYPE_INT64 source_input: "A" }',
         "batch input data type must be TYPE_INT32 or TYPE_FP32 for m"),
        (A + B + 'batch_input { data_type: TYPE_INT32 source_input: "Z" }', "unknown source input name 'Z' for m"),
        (A + B + 'batch_output { target_name: "B" }',
         "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0 for m"),
        (A + B + 'batch_output { target_name: "B" source_input: "Z" }', "unknown source input name 'Z' for m"),
        (A + B + 'batch_output { target_name: "Z" source_input: "A" }', "unknown target output name 'Z' for m"),
        (A + B + 'batch_output { target_name: ["B", "B"] source_input: "A" }',
         "target output name 'B' can only be specified once for m"),
    ],
)  # fmt: skip
def test_tensors_are_refused_when_a_version_is_loaded(text: str, message: str) -> None:
    config = completed(text)

    validate(config)
    with pytest.raises(Problem) as caught:
        validate_io(config)
    assert caught.value.message == message


@pytest.mark.parametrize(
    "text",
    [
        A + B,
        "",
        tensor("dims: 1 reshape {}") + " max_batch_size: 2",
        tensor("dims: [4, -1, 2] reshape { shape: [2, 2, -1, 2] }"),
        tensor("dims: 1 allow_ragged_batch: true"),
        A + A + B,
        A + B + 'batch_input { kind: BATCH_ITEM_SHAPE data_type: TYPE_INT32 source_input: "A" }',
    ],
)
def test_tensors_that_triton_accepts_are_accepted(text: str) -> None:
    validate_io(completed(text))


def state(text: str, dims: str = "dims: 1") -> str:
    return f'state {{ input_name: "i" output_name: "o" data_type: TYPE_INT32 {dims} {text} }}'


GOOD = 'initial_state { name: "a" data_type: TYPE_INT32 dims: 1 zero_data: true }'


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (state(GOOD + GOOD),
         "initial_state field for state input 'i' must contain exactly one or zero element. Found '2' elements."),
        (state('initial_state { name: "a" data_type: TYPE_FP32 dims: 1 zero_data: true }'),
         "The data type used for 'initial_state' field of state 'i' does not match the state data type."),
        (state("initial_state { data_type: TYPE_INT32 dims: 1 zero_data: true }"),
         "Field 'name' must be set when using initial_state for state input 'i'."),
        (state(GOOD) + state(GOOD), "State input name 'i' specified more than once."),
        (state('initial_state { name: "a" data_type: TYPE_INT32 dims: -1 zero_data: true }', "dims: -1"),
         "'initial_state' field for state input name 'i' contains variable dimensions."),
        (state(GOOD, "dims: 3"),
         "'initial_state' dim for input name 'i' doesn't match 'state' dim description. 1 != 3"),
        (state(GOOD, "dims: [1, 1]"),
         "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input 'i'. "
         "1 != 2"),
        (state('initial_state { name: "a" data_type: TYPE_INT32 dims: 1 }'),
         "'initial_state' of state input 'i' must specify 'zero_data' or 'data_file'."),
    ],
)  # fmt: skip
def test_contradictory_states_are_refused(states: str, message: str) -> None:
    with pytest.raises(Problem) as caught:
        validate_states(completed(sequence(states)))
    assert caught.value.message == message


@pytest.mark.parametrize("states", [state(GOOD), state(""), state("") + state(""), state(GOOD, "dims: -1")])
def test_states_that_triton_accepts_are_accepted(states: str) -> None:
    validate_states(completed(sequence(states)))


@pytest.mark.parametrize(
    ("group", "gpus", "message"),
    [
        ("kind: KIND_MODEL gpus: 0", (), "has kind KIND_MODEL but specifies one or more GPUs"),
        ("kind: KIND_CPU gpus: 0", (), "has kind KIND_CPU but specifies one or more GPUs"),
        ("gpus: 0", (), "has kind KIND_CPU but specifies one or more GPUs"),
        ("kind: KIND_GPU", (), "has kind KIND_GPU but no GPUs are available"),
        ("kind: KIND_GPU gpus: 7", (0, 1),
         "specifies invalid or unsupported gpu id 7. GPUs with at least the minimum required CUDA compute "
         "compatibility of 6.000000 are: 0 1"),
        ('kind: KIND_CPU profile: "1"', (),
         "and platform specifies profile field which is only supported for TensorRT models"),
    ],
)  # fmt: skip
def test_instances_that_the_machine_cannot_have_are_refused(group: str, gpus: tuple[int, ...], message: str) -> None:
    with pytest.raises(Problem) as caught:
        validate_instances(completed(f"instance_group {{ {group} }}", gpus), gpus)
    assert caught.value.message == f"instance group m_0 of model m {message}"


def test_gpu_group_that_was_not_completed_is_refused() -> None:
    config = parse('name: "m" instance_group { name: "g" kind: KIND_GPU }', "c")

    with pytest.raises(Problem, match="instance group g of model m has kind KIND_GPU but specifies no GPUs"):
        validate_instances(config, (0,))


def warmup(text: str, batch_size: int = 1) -> str:
    return f'model_warmup {{ name: "w" batch_size: {batch_size} inputs {{ key: "A" value {{ {text} }} }} }}'


def test_warmup_without_data_or_with_open_shape_is_refused() -> None:
    with pytest.raises(Problem, match="all variable-size dimensions are specified for input 'A'"):
        refuse(warmup_problems(completed(warmup("data_type: TYPE_FP32 dims: -1 zero_data: true"))))
    with pytest.raises(Problem, match="expects input 'A' to have input_data_type set"):
        refuse(warmup_problems(completed(warmup("data_type: TYPE_FP32 dims: 1"))))
    refuse(warmup_problems(completed(warmup("data_type: TYPE_FP32 dims: -1", batch_size=0))))
    assert warmup_size_problem("few", 16, 3).message == (
        "[request id: <id_unknown>] warmup setting expects 16 bytes, but the data provided from fewonly has 3 bytes"
    )


def test_every_problem_of_a_configuration_is_reported_with_its_line() -> None:
    text = 'backend: "python"\nmax_batch_size: -1\ndynamic_batching {\n  preferred_batch_size: [\n    0 ]\n}\n'
    problems = list(static_problems(completed(text)))

    assert [locate(text, problem.field) for problem in problems] == [2, 5]
