"""Configurations completed from a graph, and checked against it."""

from __future__ import annotations

from typing import Any

import pytest

from conch.backends.graphs.signature import GraphTensor, check, complete
from conch.core.errors import Code, ConchError

A = GraphTensor("a", "FP32", (-1, 16))
B = GraphTensor("b", "INT64", (-1, 2, -1))
FIXED = GraphTensor("fixed", "FP32", (2, 16))


def _complete(config: dict[str, Any], *, default: int = 4, inputs: Any = (A,), outputs: Any = (B,)) -> Any:
    warnings: list[str] = []
    return complete({"name": "m", "max_batch_size": 0, **config}, inputs, outputs, default, warnings.append), warnings


def test_a_model_that_can_batch_gets_the_default_batch_size_and_dynamic_batching() -> None:
    completed, warnings = _complete({})
    assert completed == {
        "name": "m",
        "max_batch_size": 4,
        "dynamic_batching": {},
        "input": [{"name": "a", "data_type": "TYPE_FP32", "dims": [16]}],
        "output": [{"name": "b", "data_type": "TYPE_INT64", "dims": [2, -1]}],
    }
    assert warnings == [
        "autofilled max_batch_size to 4 for model 'm' since batching is supporrted but no max_batch_size is specified "
        "in model configuration. Must specify max_batch_size to utilize autofill with a larger max batch size"
    ]


def test_a_batch_size_and_a_scheduler_that_are_given_stay() -> None:
    completed, warnings = _complete({"max_batch_size": 8, "sequence_batching": {}})
    assert completed["max_batch_size"] == 8
    assert "dynamic_batching" not in completed
    assert not warnings


@pytest.mark.parametrize("default", [0, -1])
def test_without_a_default_batch_size_the_batch_dimension_is_one_of_the_tensor(default: int) -> None:
    completed, _ = _complete({}, default=default)
    assert completed["max_batch_size"] == 0
    assert "dynamic_batching" not in completed
    assert completed["input"][0]["dims"] == [-1, 16]


def test_batches_of_one_need_no_scheduler() -> None:
    completed, _ = _complete({}, default=1)
    assert "dynamic_batching" not in completed


def test_one_tensor_without_a_variable_first_dimension_forbids_batches() -> None:
    completed, warnings = _complete({}, outputs=(FIXED,))
    assert completed["max_batch_size"] == 0
    assert completed["output"][0]["dims"] == [2, 16]
    assert not warnings
    with pytest.raises(ConchError) as error:
        _complete({"max_batch_size": 2}, outputs=(FIXED,))
    assert error.value.status == (
        "Invalid argument: autofill failed for model 'm': model does not support batching while non-zero "
        "max_batch_size is specified"
    )


def test_only_what_is_missing_is_completed() -> None:
    given = [{"name": "mine", "data_type": "TYPE_FP32", "dims": ["16"]}]
    completed, _ = _complete({"input": given, "output": []})
    assert completed["input"] == given
    assert [output["name"] for output in completed["output"]] == ["b"]


def test_scalars_become_tensors_of_one_element() -> None:
    completed, _ = _complete({}, inputs=(GraphTensor("s", "BYTES", ()),))
    assert completed["input"] == [{"name": "s", "data_type": "TYPE_STRING", "dims": [1], "reshape": {"shape": []}}]


def test_values_that_no_client_can_send_are_named() -> None:
    with pytest.raises(ConchError, match=r"tensor 'b' is a seq\(map\(int64,tensor\(float\)\)\)") as error:
        _complete({}, outputs=(GraphTensor("b", "seq(map(int64,tensor(float)))", ()),))
    assert error.value.code is Code.UNSUPPORTED


def _input(name: str = "a", data_type: str = "TYPE_FP32", dims: Any = ("16",), **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": list(dims), **more}


OUTPUT = {"name": "b", "data_type": "TYPE_INT64", "dims": ["2", "-1"]}


def _config(size: int = 8, **tensors: Any) -> dict[str, Any]:
    return {"name": "m", "max_batch_size": size, "input": [_input()], "output": [OUTPUT], **tensors}


def test_a_configuration_that_fits_passes() -> None:
    check(_config(), [A], [B])
    check(_config(output=[]), [A], [B])
    check(_config(output=[{**OUTPUT, "dims": [2, 7]}]), [A], [B])
    check(_config(0, input=[_input(dims=[1], reshape={"shape": []})], output=[]), [GraphTensor("a", "FP32", ())], [B])


@pytest.mark.parametrize(
    ("config", "inputs", "message"),
    [
        (
            _config(input=[_input(), _input("c")]),
            [A],
            "unable to load model 'm', configuration expects 2 inputs, model provides 1",
        ),
        (
            _config(input=[_input(), _input("x")]),
            [A, GraphTensor("c", "FP32", (-1, 1))],
            "unexpected inference input 'x', allowed inputs are: a, c",
        ),
        (_config(output=[_input("y")]), [A], "unexpected inference output 'y', allowed outputs are: b"),
        (
            _config(input=[_input(data_type="TYPE_INT32")]),
            [A],
            "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'a', model provides "
            "TYPE_FP32",
        ),
        (
            _config(input=[_input(dims=[16, 1])]),
            [A],
            "model 'm', tensor 'a': the model expects 2 dimensions (shape [-1,16]) but the model configuration "
            "specifies 3 dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit "
            "tensor shape, making complete shape [-1,16,1])",
        ),
        (
            _config(0, input=[_input(dims=[16])], output=[]),
            [FIXED],
            "unexpected inference input 'a', allowed inputs are: fixed",
        ),
        (
            _config(0, input=[_input("fixed", dims=[2, -1])], output=[]),
            [FIXED],
            "model 'm', tensor 'fixed': the model expects 2 dimensions (shape [2,16]) but the model configuration "
            "specifies 2 dimensions (shape [2,-1])",
        ),
        (
            _config(input=[_input("fixed")], output=[]),
            [FIXED],
            "model 'm', tensor 'fixed': for the model to support batching the shape should have at least 1 dimension "
            "and the first dimension must be -1; but shape expected by the model is [2,16]",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    config: dict[str, Any], inputs: list[GraphTensor], message: str
) -> None:
    with pytest.raises(ConchError) as error:
        check(config, inputs, [B])
    assert error.value.status == f"Invalid argument: {message}"


COUNT = GraphTensor("count", "FP32", (-1,))
RAGGED = GraphTensor("a", "FP32", (-1,))
BATCH_INPUT = {"kind": "BATCH_ELEMENT_COUNT", "target_name": ["count"], "data_type": "TYPE_FP32", "source_input": ["a"]}


def test_what_a_batch_adds_and_takes_is_compared_with_the_graph() -> None:
    ragged = _config(input=[_input(dims=[-1], allow_ragged_batch=True)], batch_input=[BATCH_INPUT])
    check(ragged, [RAGGED, COUNT], [B])
    scattered = {"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["b"], "source_input": ["a"]}
    check({**ragged, "batch_output": [scattered]}, [RAGGED, COUNT], [GraphTensor("b", "INT64", (-1,))])


@pytest.mark.parametrize(
    ("more", "inputs", "message"),
    [
        (
            {"input": [_input(allow_ragged_batch=True)]},
            [A],
            "unable to load model 'm', configuration expects model provides input with shape [-1]  for ragged input "
            "'a', model provides [-1,16]",
        ),
        (
            {"batch_input": [BATCH_INPUT]},
            [A],
            "unable to load model 'm', configuration expects 2 inputs, model provides 1",
        ),
        (
            {"batch_input": [{**BATCH_INPUT, "target_name": ["other"]}]},
            [A, COUNT],
            "unexpected inference input 'other', allowed inputs are: a, count",
        ),
        (
            {"batch_input": [{**BATCH_INPUT, "data_type": "TYPE_INT32"}]},
            [A, COUNT],
            "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'count', model provides "
            "TYPE_FP32",
        ),
    ],
)
def test_what_a_batch_adds_and_the_graph_does_not_take_is_refused(
    more: dict[str, Any], inputs: list[GraphTensor], message: str
) -> None:
    with pytest.raises(ConchError) as error:
        check(_config(**more), inputs, [B])
    assert error.value.status == f"Invalid argument: {message}"


def test_inputs_that_a_batch_adds_are_not_asked_of_clients() -> None:
    completed, _ = _complete({"batch_input": [BATCH_INPUT]}, inputs=(RAGGED, COUNT))
    assert [tensor["name"] for tensor in completed["input"]] == ["a"]


def test_optional_inputs_are_the_graphs_initializers_and_not_for_models_that_batch() -> None:
    given = _config(0, input=[_input("fixed", dims=[2, 16]), _input("bias", dims=[16], optional=True)], output=[])
    bias = GraphTensor("bias", "FP32", (16,))
    check(given, [FIXED], [B], [bias])
    with pytest.raises(ConchError, match="unexpected inference input 'bias', allowed inputs are: fixed"):
        check(given, [FIXED], [B])
    with pytest.raises(ConchError) as error:
        check(_config(input=[_input(), _input("bias", dims=[16], optional=True)]), [A], [B], [bias])
    assert error.value.message == (
        "unable to load model 'm', optional input 'bias' is not supported for models that support batching"
    )
