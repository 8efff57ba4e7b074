"""Bodies of infer requests: framing, the JSON object, binary data, parameters, outputs."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from conch.core.errors import Code, ConchError
from conch.core.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, ModelSignature, TensorSpec
from conch.core.tensors import WireTensor, split_bytes
from conch.wire.json.infer import JsonOutputPlan, RequestedOutput, decode_infer


def signature(*inputs: TensorSpec, max_batch_size: int = 0) -> ModelSignature:
    specs = inputs or (TensorSpec("IN", "INT32", (-1,)), TensorSpec("IN1", "INT32", (-1,)))
    return ModelSignature("m", 3, max_batch_size, {spec.name: spec for spec in specs}, {})


def decode(document: Any, header_length: int | None = None, **options: Any) -> tuple[InferRequest, JsonOutputPlan]:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return decode_infer(body, header_length, signature(), lambda response: None, **options)


def refusal(document: Any, header_length: int | None = None, **options: Any) -> tuple[Code, str]:
    with pytest.raises(ConchError) as caught:
        decode(document, header_length, **options)
    return caught.value.code, caught.value.message


def binary(name: str, size: Any, shape: list[int], datatype: str = "INT32") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


INPUT = {"name": "IN", "datatype": "INT32", "shape": [2], "data": [1, 2]}


def test_request_carries_what_the_body_says() -> None:
    request, plan = decode({"id": "q", "inputs": [INPUT], "outputs": [{"name": "OUT"}]})
    assert (request.model_name, request.model_version, request.id, request.outputs) == ("m", 3, "q", ("OUT",))
    tensor = request.inputs["IN"]
    assert (tensor.name, tensor.datatype, tensor.shape, tensor.data) == ("IN", "INT32", (2,), struct.pack("<2i", 1, 2))
    assert plan.outputs == {"OUT": RequestedOutput(binary=False)}


# --- framing


def test_binary_tensors_are_slices_of_the_body() -> None:
    header = json.dumps({"inputs": [binary("IN", 8, [2]), INPUT | {"name": "MID"}, binary("IN1", 4, [1])]}).encode()
    body = header + bytes(range(12))
    request, _ = decode(body, len(header))
    first, second = request.inputs["IN"].data, request.inputs["IN1"].data
    assert (bytes(first), bytes(second)) == (bytes(range(8)), bytes(range(8, 12)))
    assert isinstance(first, memoryview) and first.obj is body
    assert isinstance(second, memoryview) and second.obj is body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytes(7), "unexpected size for input 'IN1', expecting 1 additional bytes for model 'm'"),
        (bytes(3), "unexpected size for input 'IN', expecting 1 additional bytes for model 'm'"),
        (bytes(9), "unexpected additional input data for model 'm'"),
        (b"", "unexpected size for input 'IN', expecting 4 additional bytes for model 'm'"),
    ],
)
def test_binary_data_of_the_wrong_size_is_refused(data: bytes, message: str) -> None:
    header = json.dumps({"inputs": [binary("IN", 4, [1]), binary("IN1", 4, [1])]}).encode()
    assert refusal(header + data, len(header)) == (Code.INVALID_ARG, message)


def test_binary_size_without_header_length_finds_no_data() -> None:
    message = "unexpected size for input 'IN', expecting 4 additional bytes for model 'm'"
    assert refusal({"inputs": [binary("IN", 4, [1])]}) == (Code.INVALID_ARG, message)


def test_absurd_binary_size_is_refused() -> None:
    code, message = refusal({"inputs": [binary("IN", 2**64 - 1, [1])]})
    assert code is Code.INVALID_ARG and message.startswith("unexpected size for input 'IN', expecting 1844674407370955")


def test_header_longer_than_the_body_is_refused() -> None:
    expected = (Code.INVALID_ARG, "unexpected size for request JSON, expecting 5 more bytes")
    assert refusal(b"{}", 7) == expected


# --- raw requests


def raw(
    body: bytes, spec: TensorSpec, max_batch_size: int = 0, header_length: int | None = 0, **options: Any
) -> WireTensor:
    request, plan = decode_infer(
        body, header_length, signature(spec, max_batch_size=max_batch_size), lambda response: None, **options
    )
    assert plan.binary and not plan.outputs
    (tensor,) = request.inputs.values()
    return tensor


def test_raw_body_fills_the_only_variable_dimension() -> None:
    tensor = raw(bytes(24), TensorSpec("IN", "FP32", (2, -1)), 8)
    assert (tensor.name, tensor.datatype, tensor.shape, len(tensor.data)) == ("IN", "FP32", (1, 2, 3), 24)


@pytest.mark.parametrize("body", [b"hello", b""])
def test_raw_text_becomes_one_element(body: bytes) -> None:
    tensor = raw(body, TensorSpec("IN", "BYTES", (1,)), 8)
    assert (tensor.shape, split_bytes(tensor.data)) == ((1, 1), [body])


def test_empty_body_is_a_raw_request() -> None:
    assert raw(b"", TensorSpec("IN", "FP32", (-1,)), header_length=None).shape == (0,)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            [TensorSpec("A", "FP32", (1,)), TensorSpec("B", "FP32", (1,))],
            "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but got 2 inputs"
            " in 'm' model configuration",
        ),
        (
            [TensorSpec("A", "FP32", (-1, -1))],
            "[request id: <id_unknown>] The shape of the raw input 'A' can not be deduced because there are more than"
            " one variable-sized dimension",
        ),
        (
            [TensorSpec("A", "BYTES", (2,))],
            "[request id: <id_unknown>] For BYTE datatype raw input 'A', the model must have input shape [1]",
        ),
    ],
)
def test_raw_request_that_leaves_questions_is_refused(specs: list[TensorSpec], message: str) -> None:
    with pytest.raises(ConchError) as caught:
        decode_infer(bytes(8), 0, signature(*specs), lambda response: None)
    assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, message)


# --- the JSON object; statuses and texts are Triton 2.51's


@pytest.mark.parametrize(
    ("document", "code", "message"),
    [
        ({}, Code.INTERNAL, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ([], Code.INTERNAL, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        ({"inputs": {}}, Code.INTERNAL, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        ({"id": 5, "inputs": []}, Code.INTERNAL, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"parameters": 5}, Code.INTERNAL, "failed to get request params.: attempt to get members for non-object"),
        (
            {"inputs": [{"data": [1]}]},
            Code.INTERNAL,
            "Unable to parse 'name': attempt to access non-existing object member 'name'",
        ),
        (
            {"inputs": [{"data": [1], "name": "x"}]},
            Code.INTERNAL,
            "Unable to parse 'datatype': attempt to access non-existing object member 'datatype'",
        ),
        (
            {"inputs": [{"data": [1], "name": "x", "datatype": "FOO"}]},
            Code.INTERNAL,
            "Unable to parse 'shape': attempt to access non-existing object member 'shape'",
        ),
        ({"inputs": [INPUT | {"datatype": "FOO"}]}, Code.INVALID_ARG, "invalid datatype for input IN"),
        (
            {"inputs": [INPUT | {"data": None}]},
            Code.INTERNAL,
            "Unable to parse 'data': attempt to access JSON non-array as array",
        ),
        (
            {"inputs": [INPUT, INPUT]},
            Code.INVALID_ARG,
            "[request id: <id_unknown>] input 'IN' already exists in request",
        ),
        (
            {"id": "q", "inputs": [INPUT, INPUT]},
            Code.INVALID_ARG,
            "[request id: q] input 'IN' already exists in request",
        ),
        (
            {"inputs": [binary("IN", "x", [1])]},
            Code.INTERNAL,
            "Unable to parse 'binary_data_size': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
    ],
)
def test_wrong_documents_are_refused_with_tritons_words(document: Any, code: Code, message: str) -> None:
    assert refusal(document) == (code, message)


@pytest.mark.parametrize(
    ("item", "found"),
    [
        (5, "no field is set"),
        ({"name": "IN"}, "no field is set"),
        ({"name": "IN", "parameters": 5}, "no field is set"),
        (INPUT | {"parameters": {"binary_data_size": 8}}, "set 'data' 'binary_data_size'"),
        (INPUT | {"parameters": {"shared_memory_region": 5}}, "set 'data' 'shared_memory_region'"),
        (
            INPUT | {"parameters": {"shared_memory_region": "r", "binary_data_size": "x"}},
            "set 'data' 'binary_data_size' 'shared_memory_region'",
        ),
    ],
)
def test_input_has_exactly_one_source_of_data(item: Any, found: str) -> None:
    assert refusal({"inputs": [item]}) == (
        Code.INVALID_ARG,
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
        f" 'shared_memory_region' in 'parameters'. But {found}",
    )


@pytest.mark.parametrize("dim", [-1, "1", 1.0, True, None, [1], 2**64])
def test_dimensions_are_unsigned_integers(dim: Any) -> None:
    message = "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"
    assert refusal({"inputs": [INPUT | {"shape": [dim]}]}) == (Code.INTERNAL, message)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([2**63], "invalid shape for input 'IN': shape [9223372036854775808] contains one or more invalid dimensions"),
        (
            [2**32, 2**32],
            "invalid shape for input 'IN': shape [4294967296,4294967296] causes total element count to exceed maximum"
            " size of 9223372036854775807",
        ),
        (
            [0, 2**62, 8],
            "invalid shape for input 'IN': shape [0,4611686018427387904,8] causes total element count to exceed maximum"
            " size of 9223372036854775807",
        ),
        (
            [2**62],
            "byte size overflow for input 'IN': element count (4611686018427387904) * data type size (4) exceeds"
            " maximum allowed size (9223372036854775807)",
        ),
    ],
)
def test_shapes_that_overflow_are_refused(shape: list[int], message: str) -> None:
    assert refusal({"inputs": [INPUT | {"shape": shape}]}) == (Code.INVALID_ARG, message)
    header = json.dumps({"inputs": [binary("IN", 4, shape)]}).encode()
    assert refusal(header + bytes(4), len(header)) == (Code.INVALID_ARG, message)


def test_a_product_of_many_large_dimensions_is_not_computed() -> None:
    code, message = refusal({"inputs": [INPUT | {"shape": [2**63 - 1] * 50_000}]})
    assert code is Code.INVALID_ARG and "causes total element count to exceed" in message


def test_small_json_cannot_claim_a_huge_tensor() -> None:
    assert refusal({"inputs": [INPUT | {"shape": [2**40]}]}) == (
        Code.INVALID_ARG,
        "JSON input 'IN' has a byte_size (4398046511104 bytes) that exceeds the maximum allowed value of"
        " 67108864 bytes. Use --http-max-input-size to increase the limit.",
    )


def test_json_and_raw_bodies_are_limited_but_binary_data_is_not() -> None:
    header = json.dumps({"inputs": [binary("IN", 400, [100])]}).encode()
    assert len(decode(header + bytes(400), len(header), max_input_size=200)[0].inputs["IN"].data) == 400
    assert refusal(header + bytes(400), len(header), max_input_size=20) == (
        Code.INVALID_ARG,
        f"request JSON size of {len(header)} bytes exceeds the maximum allowed input size of 20 bytes."
        " Use --http-max-input-size to increase the limit.",
    )
    with pytest.raises(ConchError) as caught:
        raw(bytes(24), TensorSpec("IN", "FP32", (-1,)), max_input_size=20)
    assert caught.value.message == (
        "Raw input has a byte_size (24 bytes) that exceeds the maximum allowed value of 20 bytes."
        " Use --http-max-input-size to increase the limit."
    )


# --- parameters


def test_parameters_go_to_their_places() -> None:
    request, plan = decode(
        {
            "parameters": {
                "sequence_id": 2**64 - 1, "sequence_start": True, "sequence_end": True, "priority": 2, "timeout": 7,
                "binary_data_output": True, "s": "x", "i": -5, "b": False, "d": 1.5, "big": 2**63,
            },
            "inputs": [],
        }
    )  # fmt: skip
    assert (request.correlation_id, request.flags) == (2**64 - 1, SEQUENCE_START | SEQUENCE_END)
    assert (request.priority, request.timeout, plan.binary) == (2, 7, True)
    assert request.parameters == {"s": "x", "i": -5, "b": False, "d": 1.5, "big": 2.0**63}
    assert type(request.parameters["big"]) is float


def test_sequence_id_may_be_a_string() -> None:
    assert decode({"parameters": {"sequence_id": "x"}, "inputs": []})[0].correlation_id == "x"


@pytest.mark.parametrize(
    ("parameters", "code", "message"),
    [
        (
            {"sequence_id": -1},
            Code.INTERNAL,
            "Unable to parse 'sequence_id': attempt to access JSON non-string as string",
        ),
        (
            {"sequence_start": 1},
            Code.INTERNAL,
            "Unable to parse 'sequence_start': attempt to access JSON non-boolean as boolean",
        ),
        (
            {"timeout": -1},
            Code.INTERNAL,
            "Unable to parse 'timeout': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            {"triton_x": 1},
            Code.INVALID_ARG,
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
        (
            {"a": None},
            Code.INVALID_ARG,
            "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            {"a": []},
            Code.INVALID_ARG,
            "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
    ],
)
def test_bad_parameters_are_refused(parameters: Any, code: Code, message: str) -> None:
    assert refusal({"parameters": parameters, "inputs": []}) == (code, message)


@pytest.mark.parametrize("document", [b'{"id":"\xff","inputs":[]}', b'{"parameters":{"a":"\xff"},"inputs":[]}'])
def test_identifiers_that_are_not_utf8_are_refused(document: bytes) -> None:
    assert refusal(document) == (Code.INVALID_ARG, "names, identifiers and parameters must be valid UTF-8")


# --- outputs


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        (5, Code.INTERNAL, "Unable to parse 'name': attempt to access non-existing object member 'name'"),
        (
            {"name": "O", "parameters": {"binary_data": 1}},
            Code.INTERNAL,
            "Unable to parse 'binary_data': attempt to access JSON non-boolean as boolean",
        ),
        (
            {"name": "O", "parameters": {"classification": -1}},
            Code.INTERNAL,
            "Unable to set 'classification': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            {"name": "O", "parameters": {"classification": 1, "shared_memory_region": "r"}},
            Code.INVALID_ARG,
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
        (
            {"name": "O", "parameters": {"binary_data": True, "shared_memory_region": "r"}},
            Code.INVALID_ARG,
            "Output can't set both 'shared_memory_region' and 'binary_data'",
        ),
    ],
)
def test_bad_outputs_are_refused(output: Any, code: Code, message: str) -> None:
    assert refusal({"inputs": [], "outputs": [output]}) == (code, message)


def test_the_same_output_twice_is_refused() -> None:
    message = "[request id: <id_unknown>] output 'O' already exists in request"
    assert refusal({"inputs": [], "outputs": [{"name": "O"}, {"name": "O"}]}) == (Code.INVALID_ARG, message)


def test_a_region_is_looked_for_once_its_parameters_make_sense() -> None:
    for offset, code in ((4, Code.NOT_FOUND), ("x", Code.INTERNAL)):
        region = {"shared_memory_region": "r", "shared_memory_byte_size": 4, "shared_memory_offset": offset}
        item = {"name": "IN", "datatype": "INT32", "shape": [1], "parameters": region}
        assert refusal({"inputs": [item]})[0] is code
        assert refusal({"inputs": [], "outputs": [{"name": "O", "parameters": region}]})[0] is code
