"""Bodies and messages: whatever they hold, they become a request or an error for the client."""

from __future__ import annotations

import contextlib
import json
from typing import Final

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from conch.core.errors import ConchError
from conch.core.inference import InferResponse, ModelSignature, TensorSpec
from conch.core.validation import validate_request
from conch.wire.anthropic.request import read_count_request, read_message_request
from conch.wire.grpc import control as grpc_control
from conch.wire.grpc import infer as grpc_infer
from conch.wire.json import control as json_control
from conch.wire.json import generate, infer
from conch.wire.multipart import read_form
from conch.wire.openai.chat import ChatRequest, read_chat
from conch.wire.openai.completions import read_completion
from conch.wire.openai.inputs import generation_inputs
from conch.wire.openai.reading import ApiError, Fields, read_body
from conch.wire.openai.responses.items import read_items
from conch.wire.openai.responses.request import read_responses
from conch.wire.retrieval.endpoints import ENDPOINTS, decode
from conch.wire.transcriptions import read_transcription
from tests.fuzz.target import target

_SPECS: Final = (
    TensorSpec("IN", "FP32", (-1,), optional=True),
    TensorSpec("INT", "INT64", (2, -1), optional=True),
    TensorSpec("text_input", "BYTES", (1,), optional=True),
    TensorSpec("top_k", "INT32", (1,), optional=True),
    TensorSpec("sampling_parameters", "BYTES", (1,), optional=True),
)
_OUT: Final = {"OUT": TensorSpec("OUT", "FP32", (-1,))}
_SIGNATURES: Final = tuple(
    ModelSignature("m", 1, batch, {spec.name: spec for spec in specs}, _OUT, by_row=by_row)
    for batch, by_row in ((0, False), (4, True))
    for specs in (_SPECS, _SPECS[:-1])
)
_TOKENS: Final = (
    b'"IN"', b'"INT"', b'"text_input"', b'"parameters"', b'"inputs"', b'"data"', b'"shape"', b'"datatype"', b'"BYTES"',
    b'"FP16"', b'"binary_data_size"', b'"classification"', b"[", b"]", b"{", b"}", b":", b",", b"NaN", b"null", b"true",
    b"\\ud800", b'"messages"', b'"role"', b'"content"', b'"tools"', b'"stop"', b'"n"', b'"logit_bias"', b'"seed"',
    b'"response_format"', b'"prompt"', b'"input"', b'"sequence_id"', b'"priority"', b'"timeout"',
)  # fmt: skip


def read_new_response(fields: Fields) -> ChatRequest:
    previous, earlier, items = read_items(fields, lambda id: b"")
    return read_responses(fields, previous=previous, earlier=earlier, items=items)


def _nothing(response: InferResponse) -> None: ...


def _json(*documents: object) -> list[bytes]:
    return [json.dumps(document).encode() for document in documents]


@target(
    seeds=[b"\0" + body for body in _json(
        {"id": "1", "inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "data": [1.5, 2]}]},
        {"inputs": [{"name": "INT", "datatype": "INT64", "shape": [2, 1], "data": [[1], [2]]}],
         "outputs": [{"name": "OUT", "parameters": {"classification": 2, "binary_data": True}}],
         "parameters": {"sequence_id": 1, "priority": 2, "timeout": 3, "binary_data_output": True}},
        {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}]},
    )],
    tokens=_TOKENS,
)  # fmt: skip
def json_infer(data: bytes) -> None:
    """The first byte says where the JSON ends, as the header does, and which model is asked."""
    body = data[1:]
    choice = data[0] if data else 0
    header = None if choice < 128 else str((choice - 128) * len(body) // 100).encode()
    signature = _SIGNATURES[choice % len(_SIGNATURES)]
    with contextlib.suppress(ConchError):
        length = infer.parse_header_length(header, len(body))
        request, plan = infer.decode_infer(body, length, signature, _nothing)
        validate_request(signature, request)
        infer.encode_infer(request, InferResponse(list(request.inputs.values())), plan, lambda name: ["a"])


@target(
    seeds=_json(
        {"text_input": "Hi", "top_k": 3, "stream": True, "parameters": {"IN": [1, 2]}},
        {"text_input": ["a", "b"], "INT": [1, 2, 3, 4], "id": "x"},
    ),
    tokens=_TOKENS,
)
def json_generate(data: bytes) -> None:
    for signature in _SIGNATURES:
        with contextlib.suppress(ConchError):
            [request], layout = generate.decode_generate(signature, data, False, infer.MAX_INPUT_SIZE)
            assert layout is not None
            validate_request(signature, request)
            generate.encode_generate(request, InferResponse(list(request.inputs.values())), layout)


@target(
    seeds=_json(
        {"ready": True},
        {"parameters": {"config": "{}", "file:1/model.py": "YQ==", "unload_dependents": True}},
        {"log_file": "", "log_info": True, "log_verbose_level": 1, "log_format": "ISO8601"},
    ),
    tokens=_TOKENS,
)
def json_control_bodies(data: bytes) -> None:
    for read in (json_control.read_index, json_control.read_load, json_control.read_unload):
        with contextlib.suppress(ConchError):
            read(data)
    with contextlib.suppress(ConchError):
        json_control.read_log_settings(data)


@target(
    seeds=_json(
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "n": 2, "stop": ["a"], "stream": True,
         "logit_bias": {"5": 1}, "top_k": -1, "stream_options": {"include_usage": True}, "logprobs": True},
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
         "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
         "tool_choice": "required"},
        {"model": "m", "messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "x"}], "response_format": {"type": "json_object"}},
        {"model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "a"}], "stop_sequences": ["a"],
         "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
                      {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}],
         "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}, "thinking": {"type": "x"}},
        {"model": "m", "instructions": "a", "max_output_tokens": 3, "text": {"format": {"type": "json_object"}},
         "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                   {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "1", "output": "x"}],
         "tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "f"}},
        {"model": "m", "input": "a", "tools": [{"type": "function", "name": "f"}], "reasoning": {"effort": "low"},
         "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
        {"model": "m", "prompt": ["a", "b"], "max_tokens": 3, "echo": False, "logprobs": 2, "guided_regex": "a+"},
    ),
    tokens=_TOKENS,
)  # fmt: skip
def openai(data: bytes) -> None:
    for read in (read_chat, read_completion, read_message_request, read_count_request, read_new_response):
        with contextlib.suppress(ConchError, ApiError):
            asked = read(read_body(data))
            for signature in _SIGNATURES:
                with contextlib.suppress(ConchError, ApiError):
                    generation_inputs(signature, {"text_input": b"x"}, asked.sampling, stream=asked.stream)


_SPEECH: Final = ModelSignature(
    "m", 1, 4,
    {"audio": TensorSpec("audio", "BYTES", (1,)), "temperature": TensorSpec("temperature", "FP32", (1,))},
    {name: TensorSpec(name, "BYTES", (1,)) for name in ("text_output", "chunks")},
)  # fmt: skip
_PART: Final = b"--e\r\nContent-Disposition: form-data; name="


@target(
    seeds=(
        _PART + b'"file"; filename="a\\"b.wav"\r\nContent-Type: audio/wav\r\n\r\nRIFF\r\n'
        + _PART + b'"model"\r\n\r\nm\r\n' + _PART + b'"temperature"\r\n\r\n0.5\r\n--e--\r\n',
        _PART + b"model\r\n\r\nm\r\n" + _PART + b"response_format\r\n\r\nverbose_json\r\n"
        + _PART + b'"timestamp_granularities[]"\r\n\r\nword\r\n' + _PART + b'"file"\r\n\r\n\r\n--e--',
    ),
    tokens=(b"\r\n", b"--e", b"--", b'"', b"\\", b";", b"=", b":", b"name", b"filename*", b"stream", b"nan", b"true"),
)  # fmt: skip
def forms(data: bytes) -> None:
    for task in ("transcribe", "translate"):
        with contextlib.suppress(ConchError):
            plan, inputs = read_transcription(
                read_form(data, "multipart/form-data; boundary=e"), task, lambda _: _SPEECH
            )
            assert len(plan.timestamps) == len(inputs) > 0


_TEXT: Final = TensorSpec("text_input", "BYTES", (1,), optional=True)
_RETRIEVAL: Final = tuple(
    ModelSignature("m", 1, 4, {spec.name: spec for spec in inputs}, {spec.name: spec for spec in outputs})
    for inputs, outputs in (
        ((_TEXT, TensorSpec("token_ids", "INT32", (-1,), optional=True)), (TensorSpec("embedding", "FP32", (8,)),)),
        ((_TEXT, TensorSpec("text_pair", "BYTES", (1,))), (TensorSpec("score", "FP32", (1,)),)),
        ((_TEXT,), (TensorSpec("label", "BYTES", (-1,)), TensorSpec("score", "FP32", (-1,)))),
    )
)


@target(
    seeds=_json(
        {"model": "m", "input": ["a", [1, 2]], "encoding_format": "base64", "dimensions": 2, "input_type": "query"},
        {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True},
        {"query": "a", "texts": ["b", "c"], "raw_scores": True, "truncate": True, "truncation_direction": "Left"},
        {"texts": ["a"], "embedding_types": ["float", "int8"], "truncate": "END", "output_dimension": 4},
        {"inputs": [["a", "b"]], "parameters": {"top_k": 1}},
        {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
        {"text_1": "a", "text_2": ["b"], "truncate_prompt_tokens": 3},
    ),
    tokens=(*_TOKENS, b'"texts"', b'"query"', b'"documents"', b'"inputs"', b'"text_1"', b'"text_2"', b'"truncate"'),
)
def retrieval(data: bytes) -> None:
    for endpoint in ENDPOINTS:
        for signature in _RETRIEVAL:
            with contextlib.suppress(ConchError, ApiError):
                decode(read_body(data), endpoint, "m", lambda _, signature=signature: signature)


def _request() -> bytes:
    message = pb.ModelInferRequest(model_name="m", id="1")
    message.inputs.add(name="IN", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1, 2])
    message.outputs.add(name="OUT").parameters["classification"].int64_param = 2
    message.parameters["sequence_id"].string_param = "x"
    message.parameters["timeout"].int64_param = 5
    return bytes(message.SerializeToString())


def _raw_request() -> bytes:
    message = pb.ModelInferRequest(model_name="m", model_version="1")
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    message.raw_input_contents.append(b"\2\0\0\0hi")
    return bytes(message.SerializeToString())


@target(seeds=[_request(), _raw_request()], tokens=[b"IN", b"OUT", b"BYTES", b"FP32", b"\x08", b"\x12", b"\x1a"])
def grpc_infer_message(data: bytes) -> None:
    try:
        message = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return
    for signature in _SIGNATURES:
        with contextlib.suppress(ConchError):
            request, plan = grpc_infer.decode_infer(message, signature, _nothing)
            validate_request(signature, request)
            grpc_infer.encode_infer(request, InferResponse(list(request.inputs.values())), plan, lambda name: ["a"])


def _load() -> bytes:
    message = pb.RepositoryModelLoadRequest(model_name="m")
    message.parameters["config"].string_param = "{}"
    message.parameters["file:1/model.py"].bytes_param = b"x"
    return bytes(message.SerializeToString())


def _logging() -> bytes:
    message = pb.LogSettingsRequest()
    message.settings["log_verbose_level"].uint32_param = 1
    message.settings["log_format"].string_param = "default"
    return bytes(message.SerializeToString())


@target(seeds=[_load(), _logging()], tokens=[b"config", b"file:", b"log_info", b"\x0a", b"\x12"])
def grpc_control_messages(data: bytes) -> None:
    for kind, read in (
        (pb.RepositoryModelLoadRequest, grpc_control.read_load),
        (pb.RepositoryModelUnloadRequest, grpc_control.read_unload),
        (pb.LogSettingsRequest, grpc_control.read_log_settings),
    ):
        with contextlib.suppress(ConchError, DecodeError):
            read(kind.FromString(data))
