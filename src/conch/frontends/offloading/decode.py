"""What a codec process does with the body of a request: the functions that front ends call for small bodies, and their
results as documents.

Each kind of work gets a header, the body, and a function that asks the server something; it returns a header and the
buffers that go with it.  Pure but for the question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import prod
from typing import Any, Final

from conch.errors import invalid
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
from conch.inference import InferRequest, InferResponse, ModelSignature
from conch.tensors import Buffer
from conch.validation import validate_request
from conch.wire import compression
from conch.wire.json.control import read_load
from conch.wire.json.generate import Layout, decode_document, read_document
from conch.wire.json.generate_texts import decode_texts
from conch.wire.json.infer import decode_infer, decode_split, parse_header_length
from conch.wire.openai.endpoints import ENDPOINTS
from conch.wire.openai.reading import read_body

#: Asks the server, which may refuse the request: then this does not return.
Ask = Callable[[Header], Header]
Result = tuple[Header, list[Buffer]]
#: From a header, what came with it, and the means to ask, to a header and what goes with it.
Work = Callable[[Header, memoryview, Ask], Result]


def infer(header: Header, body: memoryview, ask: Ask) -> Result:
    """``infer``; of a body that is not compressed the JSON alone, with the size of the tensors ``behind`` it."""
    signature = read_signature(header["signature"])
    limit, regions = header["limit"], SpanRegions()
    if "behind" in header:
        behind: Any = BodySpan(0, header["behind"])
        request, plan = decode_split(body, behind, signature, _ignore, max_input_size=limit, regions=regions)
    else:
        data = compression.decompress(body, header["encoding"], limit)
        length = parse_header_length(_bytes(header["header_length"]), len(data))
        request, plan = decode_infer(data, length, signature, _ignore, max_input_size=limit, regions=regions)
    parts: list[Buffer] = []
    document = _checked(request, signature, parts)
    return {"request": document | {"places": regions.parts}, "plan": asdict(plan)}, parts


def generate(header: Header, body: memoryview, ask: Ask) -> Result:
    """``generate`` and ``generate_stream``; ``texts`` says whether there may be several."""
    signature = read_signature(header["signature"])
    limit = header["limit"]
    document = read_document(body, signature, limit)
    requests = decode_texts(document, signature, lambda index: _ignore, limit) if header["texts"] else None
    layout = Layout.FLAT
    several = requests is not None
    if requests is None:
        request, layout = decode_document(document, signature, _ignore, max_input_size=limit)
        requests = [request]
    parts: list[Buffer] = []
    documents = [_checked(request, signature, parts) for request in requests]
    result = {"requests": documents, "several": several, "layout": layout.name}
    return result, parts


def openai(header: Header, body: memoryview, ask: Ask) -> Result:
    """An endpoint of the OpenAI API; asks for the signature of the model, whose name is in the body."""
    endpoint = ENDPOINTS[header["endpoint"]]
    fields = read_body(compression.decompress(body, header["encoding"], header["limit"]))
    signature = read_signature(ask({"model": fields.required_text("model")}))
    endpoint.require(signature)
    request = endpoint.read(fields)
    parts: list[Buffer] = []
    inputs = [tensor_documents(tensors.values(), parts) for tensors in request.inputs(signature)]
    return {"plan": plan_document(request.plan), "inputs": inputs}, parts


def load(header: Header, body: memoryview, ask: Ask) -> Result:
    """The parameters of a load: its configuration, which is the first part, and its files."""
    parameters = read_load(body)
    if len(parameters.files) > MOST_PARAMETERS:
        raise invalid(f"the load brings {len(parameters.files)} files; at most {MOST_PARAMETERS} are allowed")
    config = (parameters.config or "").encode("utf-8", "surrogateescape")
    parts: list[Buffer] = [config, *parameters.files.values()]
    result = {"config": parameters.config is not None, "files": list(parameters.files)}
    return result, parts


WORK: Final[Mapping[str, Work]] = {"infer": infer, "generate": generate, "openai": openai, "load": load}


def plan_document(plan: Any) -> dict[str, Any]:
    """The plan of an answer as JSON; ``asdict`` keeps the set of names of tools, which JSON has not."""
    document = asdict(plan)
    if "tools" in document:
        document["tools"]["names"] = sorted(document["tools"]["names"])
    return document


def _checked(request: InferRequest, signature: ModelSignature, parts: list[Buffer]) -> dict[str, Any]:
    """The document of a request that its model accepts.

    The server checks the request again: cheaply, as the elements of BYTES have been counted, and nothing is in it that
    the model does not have.
    """
    document = request_document(request, parts)
    spans = [tensor for tensor in request.inputs.values() if isinstance(tensor.data, BodySpan | RegionSpan)]
    for tensor in spans:
        batched = signature.max_batch_size > 0
        rows = (tensor.shape[0] or 1) if batched and tensor.shape else 1
        tensor.elements = rows * prod(tensor.shape[1:] if batched else tensor.shape)
    validate_request(signature, request)
    for one in document["inputs"]:
        if "part" in one:
            one["elements"] = request.inputs[one["name"]].elements
    return document


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("latin-1")


def _ignore(response: InferResponse) -> None:
    """The server makes a request of its own, which is answered."""
