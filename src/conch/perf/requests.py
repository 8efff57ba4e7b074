"""From samples to requests as they are sent: bodies of the KServe protocol over HTTP, messages of gRPC.

Made once, before anything is measured; pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from conch.errors import invalid
from conch.perf.calls import Payload
from conch.perf.inputs.data import Sample
from conch.perf.inputs.specs import ModelSpec
from conch.tensors import WireTensor, format_shape
from conch.wire.json.tensor import to_json

#: The RPCs that infer.
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
MODEL_STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


def tensors_of(model: ModelSpec, batch: Sequence[Sample]) -> list[WireTensor]:
    """The input tensors of a request for a batch; raises INVALID_ARG where its samples differ in shape."""
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


def http_request(
    model: ModelSpec, batch: Sequence[Sample], host: str, headers: Mapping[str, str], *, binary: bool, prefix: str = ""
) -> Payload:
    """A whole ``POST …/infer``, with binary tensors or all in JSON."""
    inputs: list[dict[str, Any]] = []
    data: list[bytes] = []
    for tensor in tensors_of(model, batch):
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if binary:
            entry["parameters"] = {"binary_data_size": len(tensor.data)}
            data.append(bytes(tensor.data))
        else:
            entry["data"] = to_json(tensor)
        inputs.append(entry)
    document: dict[str, Any] = {"inputs": inputs}
    if binary:
        document["parameters"] = {"binary_data_output": True}
    head = json.dumps(document, separators=(",", ":")).encode()
    body = b"".join([head, *data])
    path = f"{prefix}/v2/models/{quote(model.name, safe='')}"
    path += f"/versions/{model.version}/infer" if model.version else "/infer"
    lines = {"Host": host, "Content-Type": "application/octet-stream" if binary else "application/json", **headers}
    if binary:
        lines["Inference-Header-Content-Length"] = str(len(head))
    return Payload(http_post(path, lines, body), len(batch))


def generate_request(
    model: ModelSpec, sample: Sample, host: str, headers: Mapping[str, str], parameters: Mapping[str, Any],
    endpoint: str, prefix: str = "",
) -> Payload:  # fmt: skip
    """A ``POST …/generate`` or ``…/generate_stream``: each input a value, or a list where it has several.

    ``parameters`` are members beside the inputs, as ``max_tokens``.
    """
    document: dict[str, Any] = {}
    for tensor in tensors_of(model, [sample]):
        values = to_json(tensor)
        document[tensor.name] = values[0] if len(values) == 1 else values
    path = f"{prefix}/v2/models/{quote(model.name, safe='')}"
    path += f"/versions/{model.version}/{endpoint}" if model.version else f"/{endpoint}"
    return Payload(http_post(path, _json_headers(host, headers), _json(document | dict(parameters))))


def openai_request(
    model: str, given: Mapping[str, Any] | str, host: str, headers: Mapping[str, str], parameters: Mapping[str, Any],
    endpoint: str, *, streaming: bool, prefix: str = "",
) -> Payload:  # fmt: skip
    """A request of OpenAI's API: ``given`` is a body, or the text of its prompt; a stream is asked for its usage."""
    document: dict[str, Any] = {"model": model}
    if not isinstance(given, str):
        document |= given
    elif endpoint.endswith("chat/completions"):
        document["messages"] = [{"role": "user", "content": given}]
    else:
        document["input" if endpoint.endswith("embeddings") else "prompt"] = given
    document |= parameters
    if streaming:
        document |= {"stream": True, "stream_options": {"include_usage": True}}
    return Payload(http_post(f"{prefix}/{endpoint.strip('/')}", _json_headers(host, headers), _json(document)))


def _json_headers(host: str, headers: Mapping[str, str]) -> dict[str, str]:
    return {"Host": host, "Content-Type": "application/json", **headers}


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def http_post(path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """The bytes of a POST."""
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    lines += [f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def grpc_message(model: ModelSpec, batch: Sequence[Sample]) -> Payload:
    """A ``ModelInferRequest`` with its prefix."""
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferRequest(model_name=model.name, model_version=model.version)
    for tensor in tensors_of(model, batch):
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(bytes(tensor.data))
    encoded: bytes = message.SerializeToString()
    return Payload(b"\0" + len(encoded).to_bytes(4, "big") + encoded, len(batch))
