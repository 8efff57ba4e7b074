"""Which requests belong together: those of a sequence, and those whose prompts begin alike."""

from __future__ import annotations

import orjson
import pytest
from tritonclient.grpc.service_pb2 import ModelInferRequest

from conch.deploy.ray.affinity import PROMPT_BYTES, of_prompt, session_of_body, session_of_message
from conch.tensors import pack_bytes


@pytest.mark.parametrize(
    ("document", "session"),
    [
        ({"parameters": {"sequence_id": 7}, "inputs": []}, "sequence 7"),
        ({"parameters": {"sequence_id": "seven"}}, "sequence seven"),
        ({"parameters": {"sequence_id": 0}}, ""),
        ({"parameters": {"sequence_id": ""}}, ""),
        ({"parameters": {}}, ""),
        ({"parameters": 5, "text_input": "x"}, of_prompt(b"x")),
        ({"text_input": "x", "parameters": {"temperature": 0}}, of_prompt(b"x")),
        ({"prompt": "x"}, of_prompt(b"x")),
        ({"text_input": "first", "prompt": "x"}, of_prompt(b"first")),
        ({"text_input": ["a list"], "prompt": "x"}, of_prompt(b"x")),
        ({"text_input": ""}, ""),
        ({"text_input": 5}, ""),
        ({"inputs": []}, ""),
        ([1], ""),
        ("text", ""),
        (None, ""),
    ],
)
def test_a_request_in_json_says_where_it_belongs(document: object, session: str) -> None:
    assert session_of_body(orjson.dumps(document), None) == session


@pytest.mark.parametrize("body", [b"", b"{", b"\x1f\x8b compressed", b'{"prompt": "\xff"}', b"[" * 5000])
def test_a_body_that_is_no_json_belongs_nowhere(body: bytes) -> None:
    assert session_of_body(body, None) == ""


def test_binary_tensors_behind_the_json_are_not_read() -> None:
    header = orjson.dumps({"parameters": {"sequence_id": 7}})
    assert session_of_body(header + b"\x00" * (2 << 20), len(header)) == "sequence 7"
    assert session_of_body(header + b"\x00", None) == ""
    assert session_of_body(header + b"\x00", 0) == ""


@pytest.mark.parametrize("length", [None, 2 << 20])
def test_a_body_that_takes_long_to_read_is_not_read(length: int | None) -> None:
    body = orjson.dumps({"parameters": {"sequence_id": 7}, "text": "x" * (2 << 20)})
    assert session_of_body(body, length and len(body)) == ""


def test_only_the_beginning_of_a_prompt_counts() -> None:
    alike = [session_of_body(orjson.dumps({"prompt": "x" * PROMPT_BYTES + end}), None) for end in ("a", "b")]
    assert alike[0] == alike[1]
    assert alike[0] != session_of_body(orjson.dumps({"prompt": "x" * (PROMPT_BYTES - 1) + "y"}), None)


def message(*texts: bytes, raw: bool = True, name: str = "text_input", datatype: str = "BYTES") -> ModelInferRequest:
    request = ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name=name, datatype=datatype, shape=[len(texts)])
    if raw:
        request.raw_input_contents.append(pack_bytes(texts))
    else:
        tensor.contents.bytes_contents.extend(texts)
    return request


def test_a_prompt_belongs_to_the_same_however_it_is_sent() -> None:
    there = session_of_body(orjson.dumps({"text_input": "hello"}), None)
    assert session_of_message(message(b"hello")) == there
    assert session_of_message(message(b"hello", raw=False)) == there
    assert session_of_message(message(b"hello", b"and another row")) == there


@pytest.mark.parametrize(
    "request_",
    [
        message(name="other"),
        message(b"12345678", datatype="INT64"),
        message(raw=False),
        message(raw=True),
        message(b""),
        ModelInferRequest(),
    ],
)
def test_a_message_without_a_prompt_belongs_nowhere(request_: ModelInferRequest) -> None:
    assert session_of_message(request_) == ""


@pytest.mark.parametrize("value", [7, "seven"])
def test_a_message_of_a_sequence_belongs_to_it_whatever_its_prompt(value: int | str) -> None:
    request = message(b"hello")
    if isinstance(value, int):
        request.parameters["sequence_id"].int64_param = value
    else:
        request.parameters["sequence_id"].string_param = value
    assert session_of_message(request) == f"sequence {value}"


def test_a_message_with_an_empty_sequence_id_is_of_no_sequence() -> None:
    request = message(b"hello")
    request.parameters["sequence_id"].int64_param = 0
    assert session_of_message(request) == of_prompt(b"hello")
    request.parameters["sequence_id"].Clear()
    assert session_of_message(request) == of_prompt(b"hello")


def test_a_sequence_has_one_name_in_both_protocols() -> None:
    request = message(b"hello")
    request.parameters["sequence_id"].int64_param = -1  # as tritonclient sends 2^64 - 1
    body = orjson.dumps({"parameters": {"sequence_id": 2**64 - 1}})
    assert session_of_message(request) == session_of_body(body, None)
