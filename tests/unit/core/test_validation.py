"""Requests against model signatures; texts and their order are Triton 2.51's."""

from __future__ import annotations

import struct

import pytest

from conch.core.inference import InferRequest, ModelSignature, TensorSpec
from conch.core.tensors import ELEMENT_SIZE, WireTensor, pack_bytes
from conch.core.validation import validate_request
from tests.refusals import refused_argument

ID = "[request id: q] "
NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each"
    " input shape. If you want to specify the full shape including the batch dim in your input dims config, try"
    " setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def signature(*specs: TensorSpec, max_batch_size: int = 0) -> ModelSignature:
    outputs = {"OUT": TensorSpec("OUT", "INT32", (4,))}
    return ModelSignature("m", 1, max_batch_size, {spec.name: spec for spec in specs}, outputs)


def tensor(name: str, shape: tuple[int, ...], datatype: str = "INT32", data: bytes | None = None) -> WireTensor:
    if data is None:
        size = ELEMENT_SIZE[datatype]
        for dim in shape:
            size *= abs(dim)
        data = bytes(size)
    return WireTensor(name, datatype, shape, data)


def validate(model: ModelSignature, *tensors: WireTensor, outputs: tuple[str, ...] = ()) -> InferRequest:
    inputs = {tensor.name: tensor for tensor in tensors}
    request = InferRequest("m", inputs, lambda response: None, id="q", outputs=outputs)
    validate_request(model, request)
    return request


def refusal(model: ModelSignature, *tensors: WireTensor, outputs: tuple[str, ...] = ()) -> str:
    return refused_argument(validate, model, *tensors, outputs=outputs)


A, B = TensorSpec("A", "INT32", (4,)), TensorSpec("B", "INT32", (4,))
PLAIN, BATCHING = signature(A, B), signature(A, B, max_batch_size=4)
OPTIONAL = signature(A, TensorSpec("B", "INT32", (4,), optional=True))


def test_right_request_passes() -> None:
    assert validate(PLAIN, tensor("A", (4,)), tensor("B", (4,)), outputs=("OUT",)).batch_size == 1
    assert validate(BATCHING, tensor("A", (3, 4)), tensor("B", (3, 4))).batch_size == 3


def test_unknown_output_is_the_first_thing_refused() -> None:
    assert refusal(PLAIN, outputs=("OUT", "X")) == "unexpected inference output 'X' for model 'm'"


def test_missing_inputs_are_listed() -> None:
    assert refusal(PLAIN) == (
        f"{ID}expected 2 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s)"
        " ['A','B']. Please provide all required input(s)."
    )
    assert refusal(PLAIN, tensor("B", (4,))) == (
        f"{ID}expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['B'], but missing required input(s)"
        " ['A']. Please provide all required input(s)."
    )


def test_too_many_inputs_are_listed_in_tritons_order() -> None:
    assert refusal(PLAIN, tensor("A", (4,)), tensor("B", (4,)), tensor("X", (4,))) == (
        f"{ID}expected 2 inputs but got 3 inputs for model 'm'. Got input(s) ['X','B','A'], but missing required"
        " input(s) ]. Please provide all required input(s)."
    )


def test_optional_inputs_may_be_missing() -> None:
    validate(OPTIONAL, tensor("A", (4,)))
    assert refusal(OPTIONAL) == (
        f"{ID}expected number of inputs between 1 and 2 but got 0 inputs for model 'm'. Got input(s) [], but missing"
        " required input(s) ['A']. Please provide all required input(s)."
    )


def test_a_model_whose_inputs_are_all_optional_takes_an_empty_request() -> None:
    model = signature(TensorSpec("A", "INT32", (4,), optional=True), max_batch_size=4)
    assert validate(model).batch_size == 1


def test_inputs_are_counted_so_an_optional_one_stands_in_for_a_required_one() -> None:
    # Triton counts only; the model is left to find out.
    assert validate(OPTIONAL, tensor("B", (4,))).inputs.keys() == {"B"}


def test_unknown_input_is_refused() -> None:
    assert refusal(PLAIN, tensor("A", (4,)), tensor("X", (4,))) == "unexpected inference input 'X' for model 'm'"
    assert refusal(OPTIONAL, tensor("X", (4,))) == "unexpected inference input 'X' for model 'm'"


def test_batch_dimension_is_checked_before_anything_else_of_an_input() -> None:
    scalar = tensor("A", (), "FP32")
    assert refusal(BATCHING, scalar, tensor("B", (1, 4))) == (
        f"{ID}input 'A' has no shape but model requires batch dimension for 'm'"
    )
    assert refusal(BATCHING, tensor("A", (1, 4)), tensor("B", (2, 9), "FP32")) == (
        f"{ID}input 'A' batch size does not match other inputs for 'm'"
    )
    assert refusal(BATCHING, tensor("A", (5, 9), "FP32"), tensor("B", (5, 4))) == (
        f"{ID}inference request batch-size must be <= 4 for 'm'"
    )


def test_batch_of_none_is_refused() -> None:
    model = signature(A, max_batch_size=4)
    assert refusal(model, tensor("A", (0, 4))) == (
        f"{ID}input byte size mismatch for input 'A' for model 'm'. Expected 16, got 0"
    )


def test_datatype_must_match() -> None:
    assert refusal(signature(A), tensor("A", (4,), "FP32")) == (
        f"{ID}inference input 'A' data-type is 'FP32', but model 'm' expects 'INT32'"
    )


@pytest.mark.parametrize("shape", [(5,), (), (4, 1), (1, 4)])
def test_shape_must_match(shape: tuple[int, ...]) -> None:
    shown = ",".join(map(str, shape))
    assert refusal(signature(A), tensor("A", shape)) == (
        f"{ID}unexpected shape for input 'A' for model 'm'. Expected [4], got [{shown}]. "
    )


def test_shape_of_a_batching_model_comes_with_advice() -> None:
    assert refusal(signature(A, max_batch_size=4), tensor("A", (4,))) == (
        f"{ID}unexpected shape for input 'A' for model 'm'. Expected [-1,4], got [4]. {NOTE}"
    )


@pytest.mark.parametrize(("shape", "batch"), [((-1,), 0), ((1, -1), 4), ((-1, 4), 4)])
def test_every_dimension_must_be_given(shape: tuple[int, ...], batch: int) -> None:
    model = signature(TensorSpec("A", "INT32", (-1,)), max_batch_size=batch)
    shown = ",".join(map(str, shape))
    assert refusal(model, tensor("A", shape)) == (
        f"{ID}All input dimensions should be specified for input 'A' for model 'm', got [{shown}]"
    )


@pytest.mark.parametrize(("shape", "batch"), [((-2,), 0), ((1, -2), 4), ((-2, 4), 4)])
def test_negative_dimensions_are_refused(shape: tuple[int, ...], batch: int) -> None:
    model = signature(TensorSpec("A", "INT32", (-1,)), max_batch_size=batch)
    assert refusal(model, tensor("A", shape)).startswith(f"{ID}unexpected shape for input 'A'")


@pytest.mark.parametrize("size", [15, 17, 0])
def test_bytes_must_fill_the_shape(size: int) -> None:
    assert refusal(signature(A), tensor("A", (4,), data=bytes(size))) == (
        f"{ID}input byte size mismatch for input 'A' for model 'm'. Expected 16, got {size}"
    )


def test_huge_shape_never_matches_small_data() -> None:
    model = signature(TensorSpec("A", "INT32", (-1, -1)))
    assert "Expected 73786976294838206464, got 0" in refusal(model, tensor("A", (2**32, 2**32), data=b""))


@pytest.mark.parametrize(
    ("dims", "reshape", "batch", "given", "seen"),
    [
        ((1,), (), 4, (2, 1), (2,)),
        ((-1,), (1, -1), 4, (2, 3), (2, 1, 3)),
        ((-1, 2, -1), (-1, -1, 2), 0, (3, 2, 5), (3, 5, 2)),
        ((4,), (2, 2), 0, (4,), (2, 2)),
    ],
)
def test_model_sees_the_reshaped_input(
    dims: tuple[int, ...], reshape: tuple[int, ...], batch: int, given: tuple[int, ...], seen: tuple[int, ...]
) -> None:
    model = signature(TensorSpec("A", "INT32", dims, reshape=reshape), max_batch_size=batch)
    assert validate(model, tensor("A", given)).inputs["A"].shape == seen


def test_requests_may_share_an_input_that_is_reshaped() -> None:
    model = signature(TensorSpec("A", "INT32", (1,), reshape=()), max_batch_size=2)
    shared = tensor("A", (1, 1))
    for _ in range(2):
        assert validate(model, shared).inputs["A"].shape == (1,)


TWO = pack_bytes([b"a", b"bc"])


@pytest.mark.parametrize(("shape", "data"), [((2,), TWO), ((0,), b""), ((1,), pack_bytes([b""]))])
def test_strings_that_fill_the_shape_pass(shape: tuple[int, ...], data: bytes) -> None:
    request = validate(signature(TensorSpec("A", "BYTES", (-1,))), tensor("A", shape, "BYTES", memoryview(data)))
    assert (request.inputs["A"].shape, bytes(request.inputs["A"].data)) == (shape, data)


@pytest.mark.parametrize(
    ("counted", "message"),
    [
        (5, "unexpected number of string elements 3 for inference input 'A' for model 'm', expecting 2"),
        (1, "expected 2 string elements for inference input 'A' for model 'm', got 1"),
    ],
)
def test_strings_that_have_been_counted_are_not_read_again(counted: int, message: str) -> None:
    strings = tensor("A", (2,), "BYTES", TWO)
    strings.elements = counted
    assert refusal(signature(TensorSpec("A", "BYTES", (-1,))), strings) == ID + message


@pytest.mark.parametrize(
    ("count", "data", "message"),
    [
        (3, TWO, ID + "expected 3 string elements for inference input 'A' for model 'm', got 2"),
        (1, b"", ID + "expected 1 string elements for inference input 'A' for model 'm', got 0"),
        (
            1,
            TWO,
            ID + "unexpected number of string elements 2 for inference input 'A' for model 'm', expecting 1",
        ),
        (
            0,
            TWO,
            ID + "unexpected number of string elements 1 for inference input 'A' for model 'm', expecting 0",
        ),
        (
            2,
            TWO + b"zz",
            ID + "incomplete string length indicator for inference input 'A' for model 'm', expecting 4 bytes but only"
            " 2 bytes available. Please make sure the string length indicator is in one buffer.",
        ),
        (
            2,
            TWO[:-1],
            "incomplete string data for inference input 'A', expecting string of length 2 but only 1 bytes available",
        ),
        (
            1,
            struct.pack("<I", 2**32 - 1),
            "incomplete string data for inference input 'A', expecting string of length 4294967295 but only 0 bytes"
            " available",
        ),
    ],
)
def test_strings_that_do_not_fill_the_shape_are_refused(count: int, data: bytes, message: str) -> None:
    model = signature(TensorSpec("A", "BYTES", (-1,)))
    assert refusal(model, tensor("A", (count,), "BYTES", data)) == message
