"""Bodies of generate requests and responses; statuses and texts are Triton 2.51's."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest

from conch.errors import Code, ConchError
from conch.inference import InferRequest, InferResponse, ModelSignature, TensorSpec
from conch.tensors import WireTensor, pack_bytes, split_bytes
from conch.wire.json.generate import decode_generate, encode_generate, server_sent_event

SPECS = (
    TensorSpec("text", "BYTES", (1,)),
    TensorSpec("row", "INT32", (-1,)),
    TensorSpec("grid", "FP32", (-1, -1)),
    TensorSpec("mixed", "INT32", (2, -1, 3)),
    TensorSpec("flag", "BOOL", (1,)),
    TensorSpec("half", "FP16", (1,)),
)


def decode(document: Any, *specs: TensorSpec, max_batch_size: int = 0, **options: Any) -> InferRequest:
    inputs = {spec.name: spec for spec in specs or SPECS}
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return decode_generate(body, ModelSignature("m", 3, max_batch_size, inputs, {}), lambda response: None, **options)


def refusal(document: Any, *specs: TensorSpec, **options: Any) -> tuple[Code, str]:
    with pytest.raises(ConchError) as caught:
        decode(document, *specs, **options)
    return caught.value.code, caught.value.message


def test_members_are_inputs_by_name_and_parameters_otherwise() -> None:
    request = decode({"text": "hi", "max_tokens": 5, "id": "q", "stream": True, "sequence_id": 7, "triton_x": 1.5})
    assert split_bytes(request.inputs["text"].data) == [b"hi"]
    assert (request.id, request.correlation_id, request.outputs) == ("q", 0, ())
    assert request.parameters == {"max_tokens": 5, "id": "q", "stream": True, "sequence_id": 7, "triton_x": 1.5}


def test_nested_parameters_follow_the_same_rule() -> None:
    request = decode({"parameters": {"text": "hi", "top_k": 1, "id": "not the id"}})
    assert split_bytes(request.inputs["text"].data) == [b"hi"]
    assert (request.id, request.parameters) == ("", {"top_k": 1, "id": "not the id"})


@pytest.mark.parametrize(
    ("name", "value", "shape", "max_batch_size"),
    [
        ("text", "a", (1,), 0),
        ("text", "a", (1, 1), 8),
        ("text", ["a", "b"], (2, 1), 8),
        ("row", 5, (1,), 0),
        ("row", [1, 2, 3], (3,), 0),
        ("row", [1, 2, 3], (1, 3), 8),
        ("row", [], (0,), 0),
        ("row", [[1], [2]], (2,), 0),
        ("grid", [1, 2, 3], (1, 3), 0),
        ("grid", 1.5, (1, 1, 1), 8),
        ("mixed", [1, 2, 3, 4, 5, 6], (2, 1, 3), 0),
        ("mixed", list(range(12)), (2, 2, 3), 0),
    ],
)
def test_values_take_the_shape_of_the_input(name: str, value: Any, shape: tuple[int, ...], max_batch_size: int) -> None:
    assert decode({name: value}, max_batch_size=max_batch_size).inputs[name].shape == shape


NOT_A_STRING = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
NOT_AN_INTEGER = "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"
BAD_PARAMETER = "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'."
NO_SHAPE = "The schema can not convert input '{}' to tensor with proper shape"


@pytest.mark.parametrize(
    ("document", "code", "message"),
    [
        ([], Code.INTERNAL, "attempt to get members for non-object"),
        (b"", Code.INTERNAL, "failed to parse the request JSON buffer: The document is empty. at 0"),
        ({"id": 5}, Code.INTERNAL, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"text": 5}, Code.INTERNAL, NOT_A_STRING),
        ({"text": None}, Code.INTERNAL, NOT_A_STRING),
        ({"row": [1, "x"]}, Code.INTERNAL, NOT_AN_INTEGER),
        ({"row": 1.5}, Code.INTERNAL, NOT_AN_INTEGER),
        (
            {"row": [[1, 2]]},
            Code.INTERNAL,
            "Unable to parse 'data': Shape does not match true shape of 'data' field",
        ),
        ({"mixed": [1, 2, 3]}, Code.INVALID_ARG, NO_SHAPE.format("mixed")),
        ({"flag": [True, False]}, Code.INVALID_ARG, NO_SHAPE.format("flag")),
        ({"flag": []}, Code.INVALID_ARG, NO_SHAPE.format("flag")),
        (
            {"half": 1},
            Code.INVALID_ARG,
            "receiving FP16 data via JSON is not supported. Please use the binary data format for input half",
        ),
        ({"a": None}, Code.INVALID_ARG, BAD_PARAMETER),
        ({"a": [1]}, Code.INVALID_ARG, BAD_PARAMETER),
        ({"parameters": {"a": {}}}, Code.INVALID_ARG, f"Converting keyword: 'parameters': {BAD_PARAMETER}"),
        ({"parameters": {"text": 5}}, Code.INTERNAL, f"Converting keyword: 'parameters': {NOT_A_STRING}"),
        (
            {"parameters": 5},
            Code.INTERNAL,
            "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object",
        ),
        (
            {"text": "a", "parameters": {"text": "b"}},
            Code.INVALID_ARG,
            "Converting keyword: 'parameters': [request id: <id_unknown>] input 'text' already exists in request",
        ),
        (
            {"parameters": {"text": "b"}, "text": "a"},
            Code.INVALID_ARG,
            "[request id: <id_unknown>] input 'text' already exists in request",
        ),
    ],
)
def test_wrong_bodies_are_refused_with_tritons_words(document: Any, code: Code, message: str) -> None:
    assert refusal(document) == (code, message)


def test_an_input_called_parameters_leaves_no_room_for_parameters() -> None:
    message = "Keyword 'parameters' for nested schema also given as input tensor name"
    assert refusal({"parameters": 1}, TensorSpec("parameters", "INT32", (1,))) == (Code.INVALID_ARG, message)


def test_size_of_body_and_of_all_inputs_together_is_limited() -> None:
    hint = "Use --http-max-input-size to increase the limit."
    assert refusal({"row": 1}, max_input_size=5) == (
        Code.INVALID_ARG,
        f"request JSON size of 10 bytes exceeds the maximum allowed input size of 5 bytes. {hint}",
    )
    assert refusal({"grid": [1] * 10, "row": [1] * 40}, max_input_size=180)[1] == (
        f"request size of 200 bytes with input 'row' of size 160 bytes exceeds the maximum allowed input size of 180"
        f" bytes. {hint}"
    )


def test_response_is_one_object_in_alphabetical_order() -> None:
    outputs = [
        WireTensor("text", "BYTES", (1, 1), pack_bytes([b"hi"])),
        WireTensor("LOGITS", "FP32", (2,), struct.pack("<2f", 0.1, math.nan)),
        WireTensor("none", "INT32", (0,), b""),
        WireTensor("worst", "FP32", (1,), struct.pack("<f", -math.inf)),
    ]
    request = InferRequest("m", {}, lambda response: None, model_version=3, id="q")
    body = encode_generate(request, InferResponse(outputs, parameters={"finish": "stop"}))
    assert body == (
        b'{"LOGITS":[0.10000000149011612,NaN],"finish":"stop","id":"q","model_name":"m","model_version":"3",'
        b'"none":[],"text":"hi","worst":-Infinity}'
    )


def test_event_is_framed_for_an_event_stream() -> None:
    assert server_sent_event(b'{"a":1}') == b'data: {"a":1}\n\n'
