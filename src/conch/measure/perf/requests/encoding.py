"""Encodes requests: KServe protocol over HTTP and gRPC, generate extension and OpenAI API."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import quote

from conch.client.http1 import request_head
from conch.core.errors import invalid
from conch.core.tensors import WireTensor, format_shape
from conch.measure.perf.inputs.data import Sample
from conch.measure.perf.inputs.specs import ModelSpec
from conch.measure.perf.requests.payload import Payload, grpc_fields, json_fields
from conch.measure.perf.requests.shared_memory import MemoryLayout
from conch.wire.json.tensor import to_json


@dataclass(frozen=True, slots=True)
class RequestForm:
    """The properties that all requests share: ``parameters``, and whether they reserve space for those of a sequence.

    ``binary_input``, ``binary_output``, ``host``, ``headers`` and the path ``prefix`` apply to HTTP. If ``memory`` is
    given, tensors are in shared memory. ``encoding`` is the compression of gRPC messages.
    """

    host: str = ""
    prefix: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    sequence: bool = False
    binary_input: bool = True
    binary_output: bool = True
    memory: MemoryLayout | None = None
    encoding: str = ""


def tensors_of(model: ModelSpec, batch: Sequence[Sample]) -> list[WireTensor]:
    """Return the input tensors of a batch; raises INVALID_ARG if its samples differ in shape."""
    tensors = []
    for name, spec in model.inputs.items():
        values = [sample[name] for sample in batch if name in sample]
        if not values:
            continue
        if len(values) != len(batch) or any(value.dims != values[0].dims for value in values):
            shown = ", ".join(format_shape(value.dims) for value in values[:2])
            raise invalid(f"samples of input '{name}' cannot share a batch: {shown}; use -b 1")
        shape = (len(batch), *values[0].dims) if model.max_batch_size > 0 else values[0].dims
        tensors.append(WireTensor(name, spec.datatype, shape, b"".join(value.data for value in values)))
    return tensors


#: Size of the JSON part of a body, which precedes the tensors.
_JSON_LENGTH: Final = "Inference-Header-Content-Length"
#: Characters that are not escaped in a path with a query.
_PATH: Final = "/?&=%:@+,;~"


def infer_request(model: ModelSpec, batch: Sequence[Sample], form: RequestForm) -> Payload:
    """Return a ``POST …/infer`` request with binary tensors, JSON, or tensors in shared memory."""
    inputs: list[dict[str, Any]] = []
    data: list[bytes] = []
    for tensor in tensors_of(model, batch):
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if form.memory is not None:
            entry["parameters"] = form.memory.place(bytes(tensor.data)).parameters
        elif form.binary_input:
            entry["parameters"] = {"binary_data_size": len(tensor.data)}
            data.append(bytes(tensor.data))
        else:
            entry["data"] = to_json(tensor)
        inputs.append(entry)
    document: dict[str, Any] = {"inputs": inputs}
    if form.memory is not None:
        outputs = form.memory.outputs
        document["outputs"] = [{"name": name, "parameters": part.parameters} for name, part in outputs.items()]
    binary = {"binary_data_output": True} if form.binary_output and form.memory is None else {}
    document["parameters"] = binary | dict(form.parameters)
    head = json.dumps(document, separators=(",", ":")).encode()
    id_offset = -1
    if form.sequence:
        fields = json_fields(0)
        head = head[:-2] + (b"," if document["parameters"] else b"") + fields + b"}}"
        id_offset = len(head) - 2 - len(fields)
    lines = {"Host": form.host, "Content-Type": "application/octet-stream" if data else "application/json"}
    if data or binary:
        lines[_JSON_LENGTH] = str(len(head))
    body = b"".join([head, *data])
    request = http_post(f"{_model_path(model, form)}/infer", lines | dict(form.headers), body)
    return Payload(request, len(batch), len(request) - len(body) + id_offset if form.sequence else -1)


def generate_request(model: ModelSpec, sample: Sample, form: RequestForm, endpoint: str) -> Payload:
    """Return a ``POST …/generate`` or ``…/generate_stream`` request: each input is a value, or a list of several.

    The form's parameters, such as ``max_tokens``, are members beside the inputs.
    """
    document = {tensor.name: _value(tensor) for tensor in tensors_of(model, [sample])}
    return _json_post(f"{_model_path(model, form)}/{endpoint}", document | dict(form.parameters), form)


def openai_request(
    model: str, prompt: Mapping[str, Any] | str, form: RequestForm, endpoint: str, *, streaming: bool
) -> Payload:
    """Return a request to the OpenAI API; ``prompt`` is a body or the text of a prompt. Streams include their usage."""
    document: dict[str, Any] = {"model": model}
    if not isinstance(prompt, str):
        document |= prompt
    elif endpoint.endswith("chat/completions"):
        document["messages"] = [{"role": "user", "content": prompt}]
    else:
        document["input" if endpoint.endswith("embeddings") else "prompt"] = prompt
    document |= form.parameters
    if streaming:
        document |= {"stream": True, "stream_options": {"include_usage": True}}
    return _json_post(f"{form.prefix}/{quote(endpoint.strip('/'), safe=_PATH)}", document, form)


def http_post(path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return the bytes of a POST request; raises INVALID_ARG for characters that are not allowed in its head."""
    return request_head("POST", path, headers, len(body)) + body


def _value(tensor: WireTensor) -> Any:
    values = to_json(tensor)
    return values[0] if len(values) == 1 else values


def _model_path(model: ModelSpec, form: RequestForm) -> str:
    path = f"{form.prefix}/v2/models/{quote(model.name, safe='')}"
    return f"{path}/versions/{model.version}" if model.version else path


def _json_post(path: str, document: Mapping[str, Any], form: RequestForm) -> Payload:
    body = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    return Payload(http_post(path, {"Host": form.host, "Content-Type": "application/json", **form.headers}, body))


#: The inference methods.
MODEL_INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
MODEL_STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
#: Number of digits of a request's id in a stream; the id ends the message.
ID_SIZE: Final = 8
#: Header of field 3 of ``ModelInferRequest`` (``id``), a string of that length.
_ID_FIELD: Final = bytes([3 << 3 | 2, ID_SIZE])
#: The field of a parameter by the type of its value.
_PARAMETERS: Final[Mapping[type, str]] = {
    bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param",
}  # fmt: skip
_COMPRESS: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "gzip": lambda data: gzip.compress(data, 6, mtime=0),
    "deflate": zlib.compress,
}


def infer_message(model: ModelSpec, batch: Sequence[Sample], form: RequestForm) -> Payload:
    """Return a ``ModelInferRequest`` with its prefix."""
    encoded, id_offset = _encode(model, batch, form)
    if form.encoding:
        encoded = _COMPRESS[form.encoding](encoded)
    return Payload(_prefixed(encoded, compressed=bool(form.encoding)), len(batch), id_offset)


def stream_message(model: ModelSpec, batch: Sequence[Sample], form: RequestForm) -> Payload:
    """Return a stream message, which ends with an id; requests to decoupled models request a mark on the last
    response."""
    if model.decoupled:
        form = replace(form, parameters={**form.parameters, "triton_enable_empty_final_response": True})
    encoded, id_offset = _encode(model, batch, form)
    return Payload(_prefixed(encoded + _ID_FIELD + b"0" * ID_SIZE), len(batch), id_offset)


def _encode(model: ModelSpec, batch: Sequence[Sample], form: RequestForm) -> tuple[bytes, int]:
    """Return the message, and the offset of the sequence fields in the prefixed message (-1: none)."""
    from conch.core.protocol import grpc_service

    message = grpc_service.ModelInferRequest(model_name=model.name, model_version=model.version)
    _set(message.parameters, form.parameters)
    for tensor in tensors_of(model, batch):
        entry = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if form.memory is not None:
            _set(entry.parameters, form.memory.place(bytes(tensor.data)).parameters)
        else:
            message.raw_input_contents.append(bytes(tensor.data))
    if form.memory is not None:
        for name, part in form.memory.outputs.items():
            _set(message.outputs.add(name=name).parameters, part.parameters)
    encoded: bytes = message.SerializeToString()
    if not form.sequence:
        return encoded, -1
    return encoded + grpc_fields(0), 5 + len(encoded)


def _set(parameters: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        kind = _PARAMETERS.get(type(value))
        try:
            if kind is None:
                raise ValueError(f"{value} is neither int, float, bool nor string, and gRPC has no others")
            setattr(parameters[name], kind, value)
        except ValueError as error:
            raise invalid(f"--request-parameter {name}: {error}") from None


def _prefixed(message: bytes, *, compressed: bool = False) -> bytes:
    return bytes([compressed]) + len(message).to_bytes(4, "big") + message
