"""Bodies of infer requests and responses: framing, JSON, binary data, parameters, outputs."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest

from conch.errors import Code, ConchError
from conch.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse, ModelSignature, TensorSpec
from conch.tensors import Tensor, pack_bytes, split_bytes
from conch.wire.json.infer import OutputPlan, RequestedOutput, decode_infer, encode_infer, parse_header_length


def signature(*inputs: TensorSpec, max_batch_size: int = 0) -> ModelSignature:
    specs = inputs or (TensorSpec("IN", "INT32", (-1,)), TensorSpec("IN1", "INT32", (-1,)))
    return ModelSignature("m", 3, max_batch_size, {spec.name: spec for spec in specs}, {})


def decode(document: Any, header_length: int | None = None, **options: Any) -> tuple[InferRequest, OutputPlan]:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return decode_infer(body, header_length, signature(), lambda response: None, **options)


def one(datatype: str, data: Any, shape: list[Any] | None = None) -> bytes:
    """The bytes that JSON data of one input becomes."""
    shape = [len(data)] if shape is None else shape
    request, _ = decode({"inputs": [{"name": "IN", "datatype": datatype, "shape": shape, "data": data}]})
    return bytes(request.inputs["IN"].data)


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


@pytest.mark.parametrize(
    ("value", "length"), [(None, None), (b"0", 0), (b"5", 5), (b" 5 ", 5), (b"+5", 5), (b"10", 10)]
)
def test_header_length_is_read(value: bytes | None, length: int | None) -> None:
    assert parse_header_length(value, 10) == length


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"abc", "Unable to parse Inference-Header-Content-Length, got: abc"),
        (b"", "Unable to parse Inference-Header-Content-Length, got: "),
        (b"1_0", "Unable to parse Inference-Header-Content-Length, got: 1_0"),
        (b"\xb2", "Unable to parse Inference-Header-Content-Length, got: \xb2"),
        (b"-1", "inference header size should be in range (0, 10), got: -1"),
        (b"11", "inference header size should be in range (0, 10), got: 11"),
        (
            b"2147483648",
            "Unable to parse Inference-Header-Content-Length, value is out of range"
            " [ -2147483648, 2147483647 ], got: 2147483648",
        ),
    ],
)
def test_bad_header_length_is_refused(value: bytes, message: str) -> None:
    with pytest.raises(ConchError) as caught:
        parse_header_length(value, 10)
    assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, message)


# --- raw requests


def raw(
    body: bytes, spec: TensorSpec, max_batch_size: int = 0, header_length: int | None = 0, **options: Any
) -> Tensor:
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
            "byte size overflow for input 'IN': element count (4611686018427387904) * data type size (4) exceeds maximum"
            " allowed size (9223372036854775807)",
        ),
    ],
)
def test_shapes_that_overflow_are_refused(shape: list[int], message: str) -> None:
    assert refusal({"inputs": [INPUT | {"shape": shape}]}) == (Code.INVALID_ARG, message)
    header = json.dumps({"inputs": [binary("IN", 4, shape)]}).encode()
    assert refusal(header + bytes(4), len(header)) == (Code.INVALID_ARG, message)


def test_small_json_cannot_claim_a_huge_tensor() -> None:
    assert refusal({"inputs": [INPUT | {"shape": [2**40]}]}) == (
        Code.INVALID_ARG,
        "JSON input 'IN' has a byte_size (4398046511104 bytes) that exceeds the maximum allowed value of 67108864 bytes."
        " Use --http-max-input-size to increase the limit.",
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


# --- JSON data


@pytest.mark.parametrize(
    ("datatype", "data", "packed"),
    [
        ("BOOL", [True, False], b"\1\0"),
        ("INT8", [-1, 2], b"\xff\2"),
        ("UINT16", [1, 65535], b"\1\0\xff\xff"),
        ("INT64", [-(2**63)], struct.pack("<q", -(2**63))),
        ("UINT64", [2**64 - 1], b"\xff" * 8),
        ("FP32", [1, 0.5], struct.pack("<2f", 1, 0.5)),
        ("FP64", [2**64], struct.pack("<d", 2.0**64)),
        ("BYTES", ["a", "é\0"], b"\1\0\0\0a\3\0\0\0\xc3\xa9\0"),
    ],
)
def test_elements_become_little_endian_bytes(datatype: str, data: list[Any], packed: bytes) -> None:
    assert one(datatype, data) == packed


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[1, 2], 3, [[4]]], [[], [1, [2, 3]], 4]])
def test_nesting_of_data_does_not_matter(data: list[Any]) -> None:
    assert one("INT32", data, [4]) == struct.pack("<4i", 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("datatype", "value", "packed"),
    [
        ("INT8", 300, b"\x2c"),
        ("UINT8", 2**63, b"\0"),
        ("INT32", 2**31, b"\0\0\0\x80"),
        ("INT32", -(2**31) - 1, b"\xff\xff\xff\x7f"),
        ("UINT16", 65536 + 7, b"\7\0"),
    ],
)
def test_integers_are_cut_to_the_width_of_the_datatype(datatype: str, value: int, packed: bytes) -> None:
    assert one(datatype, [value]) == packed


def test_fp32_beyond_its_range_becomes_infinity() -> None:
    assert one("FP32", [1e39]) == struct.pack("<f", math.inf)


@pytest.mark.parametrize(
    ("datatype", "values", "words"),
    [
        ("BOOL", [1, "x", None], "JSON non-boolean as boolean"),
        ("UINT8", [True, "x", 1.5, -1, None, {}, 2**64], "JSON non-unsigned-integer as unsigned-integer"),
        ("INT32", [True, "x", 1.5, None, {}, 2**63], "JSON non-signed-integer as signed-integer"),
        ("UINT64", [-1, 2**64], "JSON non-unsigned-integer as unsigned-integer"),
        ("INT64", [2**63, 1e30], "JSON non-signed-integer as signed-integer"),
        ("FP32", [True, "x", None, []], "JSON non-number as double"),
    ],
)
def test_elements_of_the_wrong_type_are_refused(datatype: str, values: list[Any], words: str) -> None:
    for value in values:
        if value == []:
            continue
        document = {"inputs": [INPUT | {"datatype": datatype, "shape": [1], "data": [value]}]}
        assert refusal(document) == (Code.INTERNAL, f"Unable to parse 'data': attempt to access {words}")


@pytest.mark.parametrize("value", [1, True, 1.5, None, {}])
def test_bytes_elements_must_be_strings(value: Any) -> None:
    document = {"inputs": [INPUT | {"datatype": "BYTES", "data": ["a", value]}]}
    message = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
    assert refusal(document) == (Code.INTERNAL, message)


def test_number_of_elements_must_match_the_shape() -> None:
    more = "Unable to parse 'data': Shape does not match true shape of 'data' field"
    fewer = "Failed to parse 'data' field: shape does not match true shape"
    assert refusal({"inputs": [INPUT | {"data": [1, 2, "x"]}]}) == (Code.INTERNAL, more)
    assert refusal({"inputs": [INPUT | {"data": [1]}]}) == (Code.INTERNAL, fewer)
    wrong = "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"
    assert refusal({"inputs": [INPUT | {"data": [1, "x", "x"]}]}) == (Code.INTERNAL, wrong)


@pytest.mark.parametrize("datatype", ["INT32", "BYTES", "FP16"])
def test_empty_shape_ignores_the_data(datatype: str) -> None:
    assert one(datatype, [], [0]) == one(datatype, ["x"], [3, 0]) == b""


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_is_not_read_from_json(datatype: str) -> None:
    assert refusal({"inputs": [INPUT | {"datatype": datatype}]}) == (
        Code.INVALID_ARG,
        f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input IN",
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


def test_shared_memory_is_refused_once_its_parameters_make_sense() -> None:
    for offset, code in ((4, Code.UNSUPPORTED), ("x", Code.INTERNAL)):
        region = {"shared_memory_region": "r", "shared_memory_byte_size": 4, "shared_memory_offset": offset}
        item = {"name": "IN", "datatype": "INT32", "shape": [1], "parameters": region}
        assert refusal({"inputs": [item]})[0] is code
        assert refusal({"inputs": [], "outputs": [{"name": "O", "parameters": region}]})[0] is code


# --- responses


def encode(
    *outputs: Tensor, plan: OutputPlan | None = None, labels: dict[str, list[str]] | None = None, **response: Any
) -> tuple[bytes, list[Any]]:
    request = InferRequest("m", {}, lambda response: None, model_version=3, id=response.pop("id", ""))
    return encode_infer(request, InferResponse(outputs, **response), plan or OutputPlan(), (labels or {}).get)


def test_response_is_written_in_tritons_order() -> None:
    first = Tensor("A", "INT32", (1, 2), struct.pack("<2i", 1, -2))
    second = Tensor("B", "BYTES", (2,), pack_bytes([b"x", "é".encode()]))
    body, blobs = encode(first, second, id="q", parameters={"p": 1, "f": math.nan}, model_name="n", model_version=9)
    assert body.decode() == (
        '{"id":"q","model_name":"n","model_version":"9","parameters":{"p":1,"f":NaN},"outputs":['
        '{"name":"A","datatype":"INT32","shape":[1,2],"data":[1,-2]},'
        '{"name":"B","datatype":"BYTES","shape":[2],"data":["x","é"]}]}'
    )
    assert blobs == []


def test_request_names_the_model_unless_the_response_does() -> None:
    assert encode()[0] == b'{"model_name":"m","model_version":"3","outputs":[]}'


@pytest.mark.parametrize(
    ("datatype", "data", "shown"),
    [
        ("BOOL", b"\0\1", "[false,true]"),
        ("UINT64", b"\xff" * 8, "[18446744073709551615]"),
        ("FP32", struct.pack("<f", 0.1), "[0.10000000149011612]"),
        ("FP32", struct.pack("<4f", math.nan, math.inf, -math.inf, 1), "[NaN,Infinity,-Infinity,1.0]"),
        ("FP64", struct.pack("<d", 0.1), "[0.1]"),
        ("INT32", b"", "[]"),
        ("BYTES", pack_bytes([b'a\0"\\\n']), r'["a\u0000\"\\\n"]'),
    ],
)
def test_data_is_written_flat(datatype: str, data: bytes, shown: str) -> None:
    body, _ = encode(Tensor("A", datatype, (1,), memoryview(data)))
    assert f'"data":{shown}}}'.encode() in body


def test_text_that_is_not_utf8_is_written_as_it_is() -> None:
    body, _ = encode(Tensor("A", "BYTES", (2,), pack_bytes([b'a\xff"', b"c"])))
    assert body.endswith(b'"data":["a\xff\\"","c"]}]}')


def test_binary_outputs_follow_the_json_uncopied() -> None:
    data = bytearray(struct.pack("<2i", 1, 2))
    outputs = [Tensor("A", "INT32", (2,), data), Tensor("B", "INT32", (1,), bytes(4)), Tensor("C", "INT32", (0,), b"")]
    plan = OutputPlan(outputs={"A": RequestedOutput(True), "B": RequestedOutput(False), "C": RequestedOutput(True)})
    body, blobs = encode(*outputs, plan=plan)
    written = json.loads(body)["outputs"]
    assert [output.get("parameters") for output in written] == [{"binary_data_size": 8}, None, {"binary_data_size": 0}]
    assert len(blobs) == 1 and blobs[0] is data


def test_only_requested_outputs_are_written() -> None:
    outputs = [Tensor(name, "INT8", (1,), b"\1") for name in "CBA"]
    body, _ = encode(*outputs, plan=OutputPlan(outputs={"A": RequestedOutput(False), "C": RequestedOutput(False)}))
    assert [output["name"] for output in json.loads(body)["outputs"]] == ["C", "A"]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_is_written_in_binary_only(datatype: str) -> None:
    tensor = Tensor("A", datatype, (1,), b"ab")
    assert encode(tensor, plan=OutputPlan(binary=True))[1] == [b"ab"]
    with pytest.raises(ConchError) as caught:
        encode(tensor)
    assert caught.value.message == (
        f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
    )


def test_classification_replaces_the_output() -> None:
    tensor = Tensor("A", "FP32", (2, 3), struct.pack("<6f", 1, 3, 2, 6, 5, 4))
    plan = OutputPlan(batched=True, outputs={"A": RequestedOutput(False, 2)})
    body, _ = encode(tensor, plan=plan, labels={"A": ["cat", "", "dog"]})
    assert json.loads(body)["outputs"] == [
        {
            "name": "A",
            "datatype": "BYTES",
            "shape": [2, 2],
            "data": ["3.000000:1", "2.000000:2:dog", "6.000000:0:cat", "5.000000:1"],
        }
    ]
