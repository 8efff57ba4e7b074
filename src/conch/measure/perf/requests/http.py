"""Encodes requests over HTTP: KServe protocol, generate extension and OpenAI API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from conch.core.errors import invalid
from conch.core.tensors import WireTensor
from conch.measure.perf.inputs.data import Sample
from conch.measure.perf.inputs.specs import ModelSpec
from conch.measure.perf.requests.form import RequestForm, tensors_of
from conch.measure.perf.requests.payload import Payload
from conch.measure.perf.requests.sequences import json_fields
from conch.wire.json.tensor import to_json

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
    place = -1
    if form.sequence:
        fields = json_fields(0)
        head = head[:-2] + (b"," if document["parameters"] else b"") + fields + b"}}"
        place = len(head) - 2 - len(fields)
    lines = {"Host": form.host, "Content-Type": "application/octet-stream" if data else "application/json"}
    if data or binary:
        lines[_JSON_LENGTH] = str(len(head))
    body = b"".join([head, *data])
    request = http_post(f"{_model_path(model, form)}/infer", lines | dict(form.headers), body)
    return Payload(request, len(batch), len(request) - len(body) + place if form.sequence else -1)


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
    """Return the bytes of a POST request; raises INVALID_ARG for characters that its head cannot have."""
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    lines += [f"Content-Length: {len(body)}", "", ""]
    try:
        return "\r\n".join(lines).encode("latin-1") + body
    except UnicodeEncodeError as error:
        wrong = error.object[error.start : error.end]
        raise invalid(f"'{wrong}' cannot be in a path or a header of HTTP") from None


def _value(tensor: WireTensor) -> Any:
    values = to_json(tensor)
    return values[0] if len(values) == 1 else values


def _model_path(model: ModelSpec, form: RequestForm) -> str:
    path = f"{form.prefix}/v2/models/{quote(model.name, safe='')}"
    return f"{path}/versions/{model.version}" if model.version else path


def _json_post(path: str, document: Mapping[str, Any], form: RequestForm) -> Payload:
    body = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    return Payload(http_post(path, {"Host": form.host, "Content-Type": "application/json", **form.headers}, body))
