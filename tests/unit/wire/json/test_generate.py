"""Bodies of generate requests and responses; statuses and texts are Triton 2.51's."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest

from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest, InferResponse, ModelSignature, TensorSpec
from conch.core.tensors import WireTensor, pack_bytes, split_bytes
from conch.wire.json.generate import Layout, decode_generate, encode_generate, server_sent_event
from conch.wire.json.infer import MAX_INPUT_SIZE

SPECS = (
    TensorSpec("text", "BYTES", (1,)),
    TensorSpec("row", "INT32", (-1,)),
    TensorSpec("grid", "FP32", (-1, -1)),
    TensorSpec("mixed", "INT32", (2, -1, 3)),
    TensorSpec("flag", "BOOL", (1,)),
    TensorSpec("half", "FP16", (1,)),
)


def decoded(
    body: bytes, signature: ModelSignature, max_input_size: int = MAX_INPUT_SIZE
) -> tuple[InferRequest, Layout]:
    """The only request of a body."""
    [request], layout = decode_generate(signature, body, False, max_input_size)
    assert layout is not None
    return request, layout


def decode(document: Any, *specs: TensorSpec, max_batch_size: int = 0, **options: Any) -> InferRequest:
    inputs = {spec.name: spec for spec in specs or SPECS}
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    signature = ModelSignature("m", 3, max_batch_size, inputs, {})
    return decoded(body, signature, **options)[0]


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


NOT_A_STRING = "Unable to parse JSON bytes array: attempt to access JSON non-string as string (input 'text')"
NOT_AN_INTEGER = "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer (input 'row')"
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
            "Unable to parse 'data': Shape does not match true shape of 'data' field (input 'row')",
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
        ({"parameters": {"a": None}}, Code.INVALID_ARG, f"Converting keyword: 'parameters': {BAD_PARAMETER}"),
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


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [("texts", ["a"], "; did you mean 'text'?"), ("y", [1], ""), ("y", {"a": 1}, "")],
)
def test_a_list_or_an_object_under_another_name_is_answered_with_the_inputs(name: str, value: Any, hint: str) -> None:
    known = "only 'text', 'row', 'grid', 'mixed', 'flag', 'half'"
    message = (
        f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'. "
        f"Model 'm' has no input '{name}', {known}{hint}"
    )
    assert refusal({name: value}) == (Code.INVALID_ARG, message)
    prefixed = f"Converting keyword: 'parameters': {message}"
    assert refusal({"parameters": {name: value}}) == (Code.INVALID_ARG, prefixed)


@pytest.mark.parametrize(
    ("body", "id"),
    [(b'{"text": "a", "text": null}', "<id_unknown>"), (b'{"text": ["a"], "id": "q", "text": "b"}', "q")],
)
def test_an_input_that_is_there_twice_is_refused(body: bytes, id: str) -> None:
    assert refusal(body) == (Code.INVALID_ARG, f"[request id: {id}] input 'text' already exists in request")


@pytest.mark.parametrize("body", [b'{"text": "text\\"text", "x": "text"}', b'{"text": "a", "x": 1, "x": 2}'])
def test_what_is_no_input_may_be_there_twice(body: bytes) -> None:
    assert list(decode(body).inputs) == ["text"]


def test_a_text_may_be_called_as_its_input() -> None:
    assert split_bytes(decode(b'{"text": "text"}').inputs["text"].data) == [b"text"]


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


BY_ROW = ModelSignature(
    "m",
    3,
    8,
    {
        spec.name: spec
        for spec in (
            TensorSpec("query", "BYTES", (1,)),
            TensorSpec("text", "BYTES", (1,)),
            TensorSpec("labels", "BYTES", (-1,), optional=True),
            TensorSpec("top_k", "INT32", (1,), optional=True),
        )
    },
    {},
    by_row=True,
)


def by_row(document: Any, **options: Any) -> tuple[dict[str, tuple[tuple[int, ...], Any]], Layout]:
    """The shapes and the elements of the inputs."""
    request, layout = decoded(json.dumps(document).encode(), BY_ROW, **options)
    strings = {name: split_bytes(tensor.data) for name, tensor in request.inputs.items() if name != "top_k"}
    return {
        name: (tensor.shape, strings.get(name, bytes(tensor.data))) for name, tensor in request.inputs.items()
    }, layout


def test_what_is_given_once_holds_for_all_rows() -> None:
    inputs, layout = by_row({"query": "q", "text": ["a", "b"], "labels": ["x", "y", "z"], "top_k": 2})
    assert layout is Layout.ROWS
    assert inputs == {
        "query": ((2, 1), [b"q", b"q"]),
        "text": ((2, 1), [b"a", b"b"]),
        "labels": ((2, 3), [b"x", b"y", b"z", b"x", b"y", b"z"]),
        "top_k": ((2, 1), struct.pack("<2i", 2, 2)),
    }


@pytest.mark.parametrize(
    ("document", "layout"),
    [
        ({"query": "q", "text": "a"}, Layout.ROW),
        ({"query": "q", "text": "a", "labels": ["x", "y"], "top_k": [1]}, Layout.ROW),
        ({"query": "q", "text": ["a"]}, Layout.ROWS),
    ],
)
def test_list_of_one_text_gets_a_list_of_one_value(document: dict[str, Any], layout: Layout) -> None:
    assert by_row(document)[1] is layout


def test_rows_that_do_not_fit_are_left_to_the_check_of_the_request() -> None:
    inputs, _ = by_row({"query": ["p", "q", "r"], "text": ["a", "b"]})
    assert (inputs["query"][0], inputs["text"][0]) == ((3, 1), (2, 1))
    inputs, _ = by_row({"query": "q", "text": ["a"] * 9})
    assert inputs["query"][0] == (1, 1)


def test_repeated_input_counts_as_often_as_it_is_repeated() -> None:
    with pytest.raises(ConchError, match="exceeds the maximum allowed input size of 500 bytes"):
        by_row({"query": "q" * 100, "text": ["a"] * 6}, max_input_size=500)


@pytest.mark.parametrize(
    ("layout", "value"),
    [
        (Layout.FLAT, [1.0, 2.0, 3.0, 4.0]),
        (Layout.ROWS, [[1.0, 2.0], [3.0, 4.0]]),
        (Layout.ROW, [1.0, 2.0]),
    ],
)
def test_rows_stay_rows(layout: Layout, value: Any) -> None:
    assert encoded((2, 2), layout) == value


def test_row_of_a_matrix_is_a_matrix() -> None:
    assert encoded((1, 2, 2), Layout.ROW) == [[1.0, 2.0], [3.0, 4.0]]
    assert encoded((2, 2, 1), Layout.ROWS) == [[[1.0], [2.0]], [[3.0], [4.0]]]


def test_row_of_one_element_is_bare_and_an_empty_one_stays() -> None:
    assert encoded((4, 1), Layout.ROWS) == [1.0, 2.0, 3.0, 4.0]
    assert encoded((4,), Layout.ROWS) == [1.0, 2.0, 3.0, 4.0]
    assert encoded((2, 0), Layout.ROWS, count=0) == [[], []]


def test_output_without_the_batch_dimension_is_a_list() -> None:
    assert encoded((4,), Layout.ROWS, rows=2) == [1.0, 2.0, 3.0, 4.0]


def test_numbers_that_are_not_finite_are_written_in_rows_too() -> None:
    tensor = WireTensor("OUT", "FP32", (2, 2), struct.pack("<4f", 1, math.nan, 3, 4))
    request = InferRequest("m", {}, lambda response: None, model_version=3)
    request.batch_size = 2
    assert b'"OUT":[[1.0,NaN],[3.0,4.0]]' in encode_generate(request, InferResponse([tensor]), Layout.ROWS)


def encoded(shape: tuple[int, ...], layout: Layout, count: int = 4, rows: int = 0) -> Any:
    """What becomes of the elements 1.0, 2.0 … in ``shape``, as an output of a request with ``rows`` rows."""
    tensor = WireTensor("OUT", "FP32", shape, struct.pack(f"<{count}f", *range(1, count + 1)))
    request = InferRequest("m", {}, lambda response: None, model_version=3)
    request.batch_size = rows or shape[0]
    return json.loads(encode_generate(request, InferResponse([tensor]), layout))["OUT"]


def test_event_is_framed_for_an_event_stream() -> None:
    assert server_sent_event(b'{"a":1}') == b'data: {"a":1}\n\n'


@pytest.mark.parametrize("value", [[{"role": "user", "content": "Hi"}], {"role": "user"}, 5])
def test_conversation_as_json_is_told_where_to_go(value: Any) -> None:
    signature = ModelSignature("m", 1, 0, {"messages": TensorSpec("messages", "BYTES", (1,))}, {}, by_row=True)
    with pytest.raises(
        ConchError, match=r"input 'messages' must be a string that contains JSON; .* /v1/chat/completions"
    ) as refused:
        decoded(json.dumps({"messages": value}).encode(), signature)
    assert refused.value.code is Code.INVALID_ARG
    taken = decoded(b'{"messages": "[]"}', signature)[0]
    assert taken.inputs["messages"].shape == (1,)


def test_model_of_triton_s_gets_its_words_for_an_input_of_that_name() -> None:
    assert refusal({"messages": [{}]}, TensorSpec("messages", "BYTES", (-1,))) == (
        Code.INTERNAL,
        NOT_A_STRING.replace("text", "messages"),
    )
