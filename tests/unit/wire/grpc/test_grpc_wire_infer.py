"""``ModelInferRequest`` to a request, and a response to the bytes of its message."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from conch.core.errors import Code, ConchError
from conch.core.inference import SEQUENCE_END, SEQUENCE_START, InferRequest, InferResponse, ModelSignature
from conch.core.tensors import WireTensor
from conch.wire.grpc.infer import (
    GrpcOutputPlan,
    decode_infer,
    encode_empty_final,
    encode_execution_error,
    encode_infer,
    encode_stream_error,
    encode_stream_response,
)

SIGNATURE = ModelSignature("m", 1, 0, {}, {})


def ignore(response: InferResponse) -> None:
    pass


def request_message(datatype: str = "FP32", data: bytes | None = b"\0\0\0\0", **contents) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m", id="7")
    tensor = message.inputs.add(name="IN", datatype=datatype, shape=[1])
    if contents:
        tensor.contents.MergeFrom(pb.InferTensorContents(**contents))
    elif data is not None:
        message.raw_input_contents.append(data)
    return message


def refusal(message: pb.ModelInferRequest) -> str:
    with pytest.raises(ConchError) as caught:
        decode_infer(message, SIGNATURE, ignore)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


def decoded(message: pb.ModelInferRequest) -> InferRequest:
    return decode_infer(message, SIGNATURE, ignore)[0]


# Inputs


def test_request_is_what_the_message_says():
    message = request_message(data=b"abcd")
    message.inputs.add(name="OTHER", datatype="BYTES", shape=[0, 3])
    message.raw_input_contents.append(b"")
    message.outputs.add(name="B")
    message.outputs.add(name="A")
    message.outputs.add(name="B")
    request = decoded(message)
    assert (request.model_name, request.model_version, request.id) == ("m", 1, "7")
    assert request.outputs == ("B", "A")
    assert [(tensor.name, tensor.datatype, tensor.shape, tensor.data) for tensor in request.inputs.values()] == [
        ("IN", "FP32", (1,), b"abcd"),
        ("OTHER", "BYTES", (0, 3), b""),
    ]


@pytest.mark.parametrize(
    ("datatype", "contents", "expected"),
    [
        ("BOOL", {"bool_contents": [True, False]}, b"\1\0"),
        ("INT8", {"int_contents": [-1, 200]}, b"\xff\xc8"),
        ("INT16", {"int_contents": [-2, 70000]}, struct.pack("<hH", -2, 70000 & 0xFFFF)),
        ("INT32", {"int_contents": [-3]}, struct.pack("<i", -3)),
        ("INT64", {"int64_contents": [-(2**62)]}, struct.pack("<q", -(2**62))),
        ("UINT8", {"uint_contents": [255, 256]}, b"\xff\0"),
        ("UINT16", {"uint_contents": [65535]}, b"\xff\xff"),
        ("UINT32", {"uint_contents": [2**32 - 1]}, b"\xff" * 4),
        ("UINT64", {"uint64_contents": [2**64 - 1]}, b"\xff" * 8),
        ("FP32", {"fp32_contents": [0.5, float("inf")]}, struct.pack("<ff", 0.5, float("inf"))),
        ("FP64", {"fp64_contents": [0.1]}, struct.pack("<d", 0.1)),
        ("BYTES", {"bytes_contents": [b"", b"ab"]}, b"\0\0\0\0\2\0\0\0ab"),
    ],
)
def test_typed_contents_become_bytes(datatype, contents, expected):
    assert bytes(decoded(request_message(datatype, **contents)).inputs["IN"].data) == expected


def test_empty_contents_are_no_data_of_the_right_kind():
    message = request_message(data=None)
    message.inputs[0].contents.SetInParent()
    assert decoded(message).inputs["IN"].data == b""


def test_unknown_datatype_is_invalid():
    assert decoded(request_message("FP128")).inputs["IN"].datatype == "<invalid>"


def test_raw_contents_beyond_the_inputs_are_ignored():
    message = request_message(data=b"abcd")
    message.raw_input_contents.append(b"more")
    assert list(decoded(message).inputs) == ["IN"]


def test_wrong_data_is_refused_with_tritons_words():
    both = request_message(fp32_contents=[1])
    both.raw_input_contents.append(b"abcd")
    assert refusal(both) == (
        "contents field must not be specified when using raw_input_contents for 'IN' for model 'm'"
    )
    assert refusal(request_message(data=None)) == "unable to find data for input tensor 'IN' for model 'm' in request."
    short = request_message()
    short.inputs.add(name="NEXT", datatype="FP32", shape=[1])
    assert refusal(short) == "unable to find data for input tensor 'NEXT' for model 'm' in request."
    for datatype, named in (("FP32", "FP32"), ("FP16", "FP16"), ("BF16", "BF16"), ("NONE", "<invalid>")):
        assert refusal(request_message(datatype, int_contents=[1])) == (
            "unexpected explicit tensor data for input tensor 'IN' for model 'm' of type 'INT32',"
            f" expected datatype '{named}'"
        )
    twice = request_message()
    twice.inputs.add(name="IN", datatype="FP32", shape=[1])
    twice.raw_input_contents.append(b"abcd")
    assert refusal(twice) == "[request id: 7] input 'IN' already exists in request"


# Parameters


def test_parameters_go_where_they_belong():
    message = request_message()
    parameters = message.parameters
    parameters["sequence_id"].int64_param = -1
    parameters["sequence_start"].bool_param = True
    parameters["sequence_end"].bool_param = True
    parameters["priority"].uint64_param = 2**64 - 1
    parameters["timeout"].int64_param = 5
    parameters["triton_enable_empty_final_response"].bool_param = True
    parameters["binary_data_output"].string_param = "nothing special"
    parameters["real"].double_param = 0.5
    request, plan = decode_infer(message, SIGNATURE, ignore)
    assert request.correlation_id == 2**64 - 1
    assert request.flags == SEQUENCE_START | SEQUENCE_END
    assert (request.priority, request.timeout) == (2**64 - 1, 5)
    assert plan.empty_final
    assert request.parameters == {"binary_data_output": "nothing special", "real": 0.5}


def test_sequence_id_may_be_text_and_flags_false():
    message = request_message()
    message.parameters["sequence_id"].string_param = "abc"
    message.parameters["sequence_start"].bool_param = False
    request = decoded(message)
    assert (request.correlation_id, request.flags) == ("abc", 0)


@pytest.mark.parametrize(
    ("key", "kind", "value", "text"),
    [
        ("sequence_id", "bool_param", True, "expected int64_param or string_param."),
        ("sequence_id", "uint64_param", 1, "expected int64_param or string_param."),
        ("sequence_start", "string_param", "x", "expected bool_param."),
        ("sequence_end", "int64_param", 1, "expected bool_param."),
        ("priority", "string_param", "1", "expected int64_param or uint64_param."),
        ("timeout", "uint64_param", 1, "expected int64_param."),
        ("triton_enable_empty_final_response", "int64_param", 1, "expected bool_param."),
        ("own", "uint64_param", 1, "expected int64_param, bool_param, or string_param."),
    ],
)
def test_parameter_of_the_wrong_type_is_refused(key, kind, value, text):
    message = request_message()
    setattr(message.parameters[key], kind, value)
    assert refusal(message) == f"invalid value type for '{key}' parameter, {text}"


def test_wrong_parameters_are_refused():
    message = request_message()
    message.parameters["own"].SetInParent()
    assert refusal(message).startswith("invalid value type for 'own' parameter")
    message = request_message()
    message.parameters["priority"].int64_param = -1
    assert refusal(message) == "invalid value for 'priority', expected value >= 0."
    message = request_message()
    message.parameters["triton_own"].bool_param = True
    assert refusal(message) == (
        "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting"
        " with 'triton_' are allowed: triton_enable_empty_final_response"
    )


# Shared memory and classification


MEMORY = {
    "shared_memory_region": {"string_param": "r"},
    "shared_memory_byte_size": {"int64_param": 4},
    "shared_memory_offset": {"int64_param": 0},
}


def placed(target: str, **parameters: dict[str, object]) -> pb.ModelInferRequest:
    message = request_message(data=None if target == "input" else b"abcd")
    tensor = message.inputs[0] if target == "input" else message.outputs.add(name="IN")
    for key, value in parameters.items():
        tensor.parameters[key].MergeFrom(pb.InferParameter(**value))
    return message


@pytest.mark.parametrize("target", ["input", "output"])
def test_shared_memory_regions_are_unknown(target):
    with pytest.raises(ConchError) as caught:
        decode_infer(placed(target, **MEMORY), SIGNATURE, ignore)
    assert (caught.value.code, caught.value.message) == (
        Code.NOT_FOUND, "Unable to find shared memory region: 'r'",
    )  # fmt: skip


@pytest.mark.parametrize("target", ["input", "output"])
@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"shared_memory_region": {"int64_param": 1}},
            "invalid value type for 'shared_memory_region' parameter for tensor 'IN', expected string_param.",
        ),
        (
            {"shared_memory_region": {"string_param": "r"}},
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor 'IN'",
        ),
        (
            {**MEMORY, "shared_memory_byte_size": {"string_param": "4"}},
            "invalid value type for 'shared_memory_byte_size' parameter for tensor 'IN', expected int64_param.",
        ),
        (
            {"shared_memory_offset": {"int64_param": 4}},
            "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for tensor 'IN'",
        ),
        (
            {"shared_memory_byte_size": {"int64_param": 4}},
            "'shared_memory_byte_size' can not be specified without 'shared_memory_region' parameter for tensor 'IN'",
        ),
    ],
)
def test_wrong_shared_memory_parameters_are_refused(target, parameters, text):
    assert refusal(placed(target, **parameters)) == text


def test_contents_and_shared_memory_exclude_each_other():
    message = placed("input", **MEMORY)
    message.inputs[0].contents.fp32_contents.append(1)
    assert refusal(message) == (
        "unexpected 'content' provided when using shared memory for input tensor 'IN' for model 'm'"
    )


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"classification": {"string_param": "1"}},
            "invalid value type for 'classification' parameter, expected int64_param",
        ),
        ({"classification": {"int64_param": 0}}, "invalid value for 'classification' parameter, expected >= 0"),
        (
            {**MEMORY, "classification": {"int64_param": 1}},
            "output can't set both 'shared_memory_region' and 'classification'",
        ),
    ],
)
def test_wrong_classification_is_refused(parameters, text):
    assert refusal(placed("output", **parameters)) == text


# Responses


def encoded(response: InferResponse, request: InferRequest | None = None, **plan) -> pb.ModelInferResponse:
    request = request or InferRequest("m", {}, ignore, model_version=3, id="7")
    parts = encode_infer(request, response, GrpcOutputPlan("", batched=True, **plan), lambda output: ["a", "b"])
    return pb.ModelInferResponse.FromString(b"".join(parts))


def test_response_holds_outputs_in_order_with_their_bytes():
    large = bytes(range(256)) * 1000
    response = encoded(
        InferResponse(
            [WireTensor("SMALL", "FP32", (1,), b"abcd"), WireTensor("EMPTY", "BYTES", (0, 2), b""),
             WireTensor("LARGE", "UINT8", [256000], memoryview(large))],
            parameters={"text": "ü", "truth": True, "number": 2**62, "real": 0.5},
        )
    )  # fmt: skip
    assert (response.model_name, response.model_version, response.id) == ("m", "3", "7")
    assert [(output.name, output.datatype, list(output.shape)) for output in response.outputs] == [
        ("SMALL", "FP32", [1]), ("EMPTY", "BYTES", [0, 2]), ("LARGE", "UINT8", [256000]),
    ]  # fmt: skip
    assert list(response.raw_output_contents) == [b"abcd", b"", large]
    assert response.parameters["text"].string_param == "ü"
    assert response.parameters["truth"].WhichOneof("parameter_choice") == "bool_param"
    assert response.parameters["number"].int64_param == 2**62
    assert response.parameters["real"].double_param == 0.5


def test_large_buffers_are_not_copied():
    data = bytes(1 << 20)
    response = InferResponse([WireTensor("O", "UINT8", (1 << 20,), data)])
    request = InferRequest("m", {}, ignore, model_version=1)
    assert any(part is data for part in encode_infer(request, response, GrpcOutputPlan(""), lambda _: None))


def test_only_requested_outputs_are_sent():
    request = InferRequest("m", {}, ignore, model_version=1, outputs=("B",))
    tensors = [WireTensor(name, "FP32", (1,), name.encode() * 4) for name in "ABC"]
    response = encoded(InferResponse(tensors), request)
    assert [output.name for output in response.outputs] == ["B"]
    assert list(response.raw_output_contents) == [b"BBBB"]


def test_classification_is_by_row_of_the_batch():
    values = np.array([[1, 3], [5, 4]], np.int32)
    response = encoded(InferResponse([WireTensor("O", "INT32", (2, 2), values.tobytes())]), classification={"O": 1})
    assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == ("BYTES", [2, 1])
    assert response.raw_output_contents[0] == b"\5\0\0\x003:1:b\5\0\0\x005:0:a"


def test_stream_response_is_marked():
    request = InferRequest("m", {}, ignore, model_version=1)
    response = InferResponse([WireTensor("O", "UINT8", (300,), bytes(300))])
    body = encode_infer(request, response, GrpcOutputPlan(""), lambda _: None)
    for final in (True, False):
        message = pb.ModelStreamInferResponse.FromString(b"".join(encode_stream_response(body, final)))
        assert not message.error_message
        assert message.infer_response.raw_output_contents[0] == bytes(300)
        assert message.infer_response.parameters["triton_final_response"].bool_param is final


def test_stream_messages_without_outputs():
    request = InferRequest("m", {}, ignore, model_version=1, id="7")
    refused = pb.ModelStreamInferResponse.FromString(b"".join(encode_stream_error("no \udc80", "7")))
    assert refused == pb.ModelStreamInferResponse(error_message="no ?", infer_response={"id": "7"})
    failed = pb.ModelStreamInferResponse.FromString(
        b"".join(encode_execution_error("bad", request, GrpcOutputPlan("1"), final=False))
    )
    assert (failed.error_message, failed.infer_response.model_version) == ("bad", "1")
    assert failed.infer_response.parameters["triton_final_response"].bool_param is False
    last = pb.ModelStreamInferResponse.FromString(b"".join(encode_empty_final(request, GrpcOutputPlan(""))))
    assert (last.infer_response.model_name, last.infer_response.model_version) == ("m", "")
    assert last.infer_response.parameters["triton_final_response"].bool_param is True
