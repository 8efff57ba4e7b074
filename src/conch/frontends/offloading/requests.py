"""Decodes large requests in a codec process; used in place of the functions of :mod:`conch.wire`.

Runs on the event loop. The functions raise the errors of those functions and of :meth:`Codec.run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from conch.core.inference import InferRequest, InferResponse, ModelSignature
from conch.core.tensors import Buffer, WireTensor
from conch.core.validation import count_strings
from conch.frontends.offloading.documents import read_request, read_tensors, signature_document
from conch.frontends.offloading.memory import Header
from conch.frontends.offloading.pool import LARGE, Codec
from conch.wire.compression import is_identity
from conch.wire.json.control import LoadParameters
from conch.wire.json.generate import Layout
from conch.wire.json.infer import JsonOutputPlan, RequestedOutput
from conch.wire.openai.chat import ChatPlan
from conch.wire.openai.completions import CompletionPlan
from conch.wire.openai.embeddings import EmbeddingPlan
from conch.wire.openai.response import ResponsePlan
from conch.wire.openai.tool_calls import Tools
from conch.wire.regions import NO_REGIONS, Regions

OnResponse = Callable[[InferResponse], None]

#: Maximum compression ratio of deflate.
_DEFLATED: Final = 1032
#: Maximum number of BYTES elements counted on the event loop.
_MOST_STRINGS: Final = 20_000


def has_many_strings(data: Buffer) -> bool:
    """Whether checking BYTES data takes long, as the check reads each element."""
    return len(data) > LARGE and count_strings(data, _MOST_STRINGS) == _MOST_STRINGS


async def decode_infer(
    codec: Codec,
    body: Buffer,
    signature: ModelSignature,
    on_response: OnResponse,
    *,
    encoding: str = "",
    header_length: bytes | None = None,
    limit: int,
    regions: Regions = NO_REGIONS,
) -> tuple[InferRequest, JsonOutputPlan]:
    """Decode an ``infer`` body as received.

    ``encoding`` and ``header_length`` are the headers ``Content-Encoding`` and ``Inference-Header-Content-Length``.
    """
    header: Header = {
        "work": "infer",
        "signature": signature_document(signature),
        "encoding": encoding,
        "header_length": None if header_length is None else header_length.decode("latin-1"),
        "limit": limit,
    }
    result, parts = await codec.run(header, [body], size=_size(body, encoding, limit))
    request = read_request(result["request"], parts, signature, on_response, None, regions)
    return request, _plan(result["plan"])


async def decode_json(
    codec: Codec,
    body: Buffer,
    length: int,
    signature: ModelSignature,
    on_response: OnResponse,
    *,
    limit: int,
    regions: Regions = NO_REGIONS,
) -> tuple[InferRequest, JsonOutputPlan]:
    """Decode an ``infer`` body of ``length`` bytes of JSON, which alone go to the process, and tensors after it."""
    view = memoryview(body)
    header: Header = {
        "work": "infer",
        "signature": signature_document(signature),
        "behind": len(view) - length,
        "limit": limit,
    }
    result, parts = await codec.run(header, [view[:length]])
    request = read_request(result["request"], parts, signature, on_response, view[length:], regions)
    return request, _plan(result["plan"])


async def decode_generate(
    codec: Codec,
    body: Buffer,
    signature: ModelSignature,
    on_response: Callable[[int | None], OnResponse],
    *,
    texts: bool,
    limit: int,
) -> tuple[list[InferRequest], Layout | None]:
    """Decode ``generate``: return one request and its layout, or the requests of several ``texts`` and None.

    ``on_response`` takes the number of a text, None for a single request, and returns the response callback.
    """
    header: Header = {
        "work": "generate",
        "signature": signature_document(signature),
        "texts": texts,
        "limit": limit,
    }
    result, parts = await codec.run(header, [body])
    requests = [
        read_request(document, parts, signature, on_response(index if result["several"] else None))
        for index, document in enumerate(result["requests"])
    ]
    return requests, None if result["several"] else Layout[result["layout"]]


async def decode_openai(
    codec: Codec,
    body: Buffer,
    endpoint: str,
    signature_of: Callable[[str], ModelSignature],
    *,
    encoding: str,
    limit: int,
) -> tuple[ResponsePlan | EmbeddingPlan, list[dict[str, WireTensor]]]:
    """Decode an OpenAI request: return the plan of its response, and the inputs of each request to the model.

    ``signature_of`` is called with the name of the model; its errors refuse the request.
    """
    header: Header = {"work": "openai", "endpoint": endpoint, "encoding": encoding, "limit": limit}
    result, parts = await codec.run(
        header,
        [body],
        size=_size(body, encoding, limit),
        answer=lambda question: signature_document(signature_of(question["model"])),
    )
    inputs = [{tensor.name: tensor for tensor in read_tensors(row, parts)} for row in result["inputs"]]
    return _answer_plan(endpoint, result["plan"]), inputs


async def decode_load(codec: Codec, body: Buffer) -> LoadParameters:
    """Decode the parameters of a load."""
    result, (config, *files) = await codec.run({"work": "load"}, [body])
    text = str(config, "utf-8", "surrogateescape") if result["config"] else None
    return LoadParameters(text, dict(zip(result["files"], map(bytes, files), strict=True)))


async def decode_grpc(codec: Codec, message: Buffer) -> tuple[memoryview, list[memoryview], list[int | None]]:
    """Return a ``ModelInferRequest`` without tensor data, the data, and the numbers of elements of BYTES tensors.

    If all inputs had data, the result is the same as for raw contents.
    """
    result, (rest, *raw) = await codec.run({"work": "grpc infer"}, [message])
    return rest, raw, result["elements"]


def _size(body: Buffer, encoding: str, limit: int) -> int:
    """Return the maximum decompressed size of a body (bytes)."""
    return len(body) if is_identity(encoding) else min(_DEFLATED * len(body), limit)


def _plan(document: dict[str, Any]) -> JsonOutputPlan:
    outputs = {name: RequestedOutput(*wanted) for name, wanted in document["outputs"].items()}
    return JsonOutputPlan(document["binary"], document["batched"], outputs)


def _answer_plan(endpoint: str, document: dict[str, Any]) -> ResponsePlan | EmbeddingPlan:
    if endpoint == "embedding":
        return EmbeddingPlan(**document)
    if endpoint == "completion":
        return CompletionPlan(**document)
    tools = Tools(**document.pop("tools"))
    return ChatPlan(tools=replace(tools, names=frozenset(tools.names)), **document)
