"""Requests to other servers and their answers, in both protocols, without a network."""

from __future__ import annotations

import json

import pytest
from tritonclient.grpc import service_pb2

from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest
from conch.core.tensors import StoredData, WireTensor
from conch.wire.grpc import outgoing as grpc_outgoing
from conch.wire.json import outgoing as json_outgoing


class Elsewhere(StoredData):
    """Four bytes that are read when they are needed."""

    __slots__ = ()

    def __len__(self) -> int:
        return 4

    def read_into(self, target: memoryview) -> None:
        target[:] = b"\1\2\3\4"


def request(*outputs: str) -> InferRequest:
    inputs = {
        "stored": WireTensor("stored", "FP32", (1,), Elsewhere()),  # type: ignore[arg-type]
        "empty": WireTensor("empty", "FP32", (0, 3), b""),
        "large": WireTensor("large", "UINT8", (300,), memoryview(bytes(300))),
    }
    return InferRequest("local", inputs, lambda response: None, outputs=outputs, correlation_id=5, timeout=7)


def test_tensors_follow_the_message() -> None:
    sent = service_pb2.ModelInferRequest.FromString(grpc_outgoing.encode_request(request("y"), "theirs", -1))
    assert (sent.model_name, sent.model_version) == ("theirs", "")
    assert list(sent.raw_input_contents) == [b"\1\2\3\4", b"", bytes(300)]
    assert sent.parameters["sequence_id"].int64_param == 5


def test_tensors_follow_the_json() -> None:
    header, blobs = json_outgoing.encode_request(request())
    document = json.loads(header)
    assert [tensor["parameters"]["binary_data_size"] for tensor in document["inputs"]] == [4, 0, 300]
    assert b"".join(blobs) == b"\1\2\3\4" + bytes(300)
    assert document["parameters"] == {"sequence_id": 5, "timeout": 7, "binary_data_output": True}


def test_a_name_cannot_leave_the_path_of_its_model() -> None:
    assert json_outgoing.model_path("a/b?c", 2) == "/v2/models/a%2Fb%3Fc/versions/2"


def test_outputs_in_typed_fields_are_read() -> None:
    message = service_pb2.ModelInferResponse()
    tensor = message.outputs.add(name="y", datatype="BYTES", shape=[2])
    tensor.contents.bytes_contents.extend([b"a", b""])
    (output,) = grpc_outgoing.decode_response(message).outputs
    assert output.data == b"\1\0\0\0a\0\0\0\0"


@pytest.mark.parametrize("datatype", ["FP8", ""])
def test_a_datatype_that_is_unknown_is_refused(datatype: str) -> None:
    message = service_pb2.ModelInferResponse()
    message.outputs.add(name="y", datatype=datatype, shape=[1])
    with pytest.raises(ConchError, match=f"output 'y' of the response has the unknown datatype '{datatype}'"):
        grpc_outgoing.decode_response(message)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b'{"outputs": 1}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1]}]}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": ["x"], "data": [1]}]}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}]}',
    ],
)
def test_an_invalid_response_is_an_error_of_the_server(body: bytes) -> None:
    with pytest.raises(ConchError) as raised:
        json_outgoing.decode_response(body, None)
    assert raised.value.code is Code.INTERNAL


@pytest.mark.parametrize(
    ("body", "message"),
    [(b'{"error": "no"}', "no"), (b"[]", "[]"), (b"", "HTTP status 503"), (b"\xff", "\ufffd")],
)
def test_any_refusal_has_a_message(body: bytes, message: str) -> None:
    error = json_outgoing.decode_error(503, body)
    assert (error.code, error.message) == (Code.UNAVAILABLE, message)
