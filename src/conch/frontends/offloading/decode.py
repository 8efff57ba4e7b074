"""Decodes the bodies of requests in a codec process, with the functions that front ends use for small bodies.

Each kind of work gets a header, the body and a function to ask the server. It returns a header and its buffers, which
describe the request as a document. No I/O except for the question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import prod
from typing import Any, Final

from conch.core.errors import invalid
from conch.core.inference import InferRequest, ModelSignature, ignore
from conch.core.tensors import Buffer
from conch.core.validation import validate_request
from conch.frontends.offloading.documents import (
    MOST_PARAMETERS,
    BodySpan,
    RegionSpan,
    SpanRegions,
    read_signature,
    request_document,
    tensor_documents,
)
from conch.frontends.offloading.memory import Header
from conch.wire import compression
from conch.wire.json.control import read_load
from conch.wire.json.generate import Layout, decode_document, decode_texts, read_document
from conch.wire.json.infer import decode_infer, decode_split, parse_header_length
from conch.wire.openai.endpoints import ENDPOINTS
from conch.wire.openai.reading import read_body

#: Asks the server a question; does not return if the server refuses the request.
Ask = Callable[[Header], Header]
Result = tuple[Header, list[Buffer]]
#: Takes a header, its body and a function to ask the server; returns a header and its buffers.
Work = Callable[[Header, memoryview, Ask], Result]


def infer(header: Header, body: memoryview, ask: Ask) -> Result:
    """Decode ``infer``; of an uncompressed body only the JSON, with the size of the tensors ``behind`` it."""
    signature = read_signature(header["signature"])
    limit, regions = header["limit"], SpanRegions()
    if "behind" in header:
        behind: Any = BodySpan(0, header["behind"])
        request, plan = decode_split(body, behind, signature, ignore, max_input_size=limit, regions=regions)
    else:
        data = compression.decompress(body, header["encoding"], limit)
        length = parse_header_length(_bytes(header["header_length"]), len(data))
        request, plan = decode_infer(data, length, signature, ignore, max_input_size=limit, regions=regions)
    parts: list[Buffer] = []
    document = _checked(request, signature, parts)
    return {"request": document | {"places": regions.parts}, "plan": asdict(plan)}, parts


def generate(header: Header, body: memoryview, ask: Ask) -> Result:
    """Decode ``generate`` and ``generate_stream``; ``texts`` allows several texts."""
    signature = read_signature(header["signature"])
    limit = header["limit"]
    document = read_document(body, signature, limit)
    requests = decode_texts(document, signature, lambda index: ignore, limit) if header["texts"] else None
    layout = Layout.FLAT
    several = requests is not None
    if requests is None:
        request, layout = decode_document(document, signature, ignore, max_input_size=limit)
        requests = [request]
    parts: list[Buffer] = []
    documents = [_checked(request, signature, parts) for request in requests]
    result = {"requests": documents, "several": several, "layout": layout.name}
    return result, parts


def openai(header: Header, body: memoryview, ask: Ask) -> Result:
    """Decode a request of the OpenAI API; asks for the signature of the model named in the body."""
    endpoint = ENDPOINTS[header["endpoint"]]
    fields = read_body(compression.decompress(body, header["encoding"], header["limit"]))
    signature = read_signature(ask({"model": fields.required_text("model")}))
    endpoint.require(signature)
    request = endpoint.read(fields)
    parts: list[Buffer] = []
    inputs = [tensor_documents(tensors.values(), parts) for tensors in request.inputs(signature)]
    return {"plan": plan_document(request.plan), "inputs": inputs}, parts


def load(header: Header, body: memoryview, ask: Ask) -> Result:
    """Decode the parameters of a load: its configuration, which is the first part, and its files."""
    parameters = read_load(body)
    if len(parameters.files) > MOST_PARAMETERS:
        raise invalid(f"the load brings {len(parameters.files)} files; at most {MOST_PARAMETERS} are allowed")
    config = (parameters.config or "").encode("utf-8", "surrogateescape")
    parts: list[Buffer] = [config, *parameters.files.values()]
    result = {"config": parameters.config is not None, "files": list(parameters.files)}
    return result, parts


WORK: Final[Mapping[str, Work]] = {"infer": infer, "generate": generate, "openai": openai, "load": load}


def plan_document(plan: Any) -> dict[str, Any]:
    """Return the plan of a response as JSON; the set of tool names becomes a list."""
    document = asdict(plan)
    if "tools" in document:
        document["tools"]["names"] = sorted(document["tools"]["names"])
    return document


def _checked(request: InferRequest, signature: ModelSignature, parts: list[Buffer]) -> dict[str, Any]:
    """Return the document of a request that its model accepts.

    The server checks the request again at low cost: the elements of BYTES have been counted, and the request has no
    unknown names.
    """
    document = request_document(request, parts)
    spans = [tensor for tensor in request.inputs.values() if isinstance(tensor.data, BodySpan | RegionSpan)]
    for tensor in spans:
        batched = signature.max_batch_size > 0
        rows = (tensor.shape[0] or 1) if batched and tensor.shape else 1
        tensor.elements = rows * prod(tensor.shape[1:] if batched else tensor.shape)
    validate_request(signature, request)
    for tensor in document["inputs"]:
        if "part" in tensor:
            tensor["elements"] = request.inputs[tensor["name"]].elements
    return document


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("latin-1")
