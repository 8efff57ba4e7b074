"""Encodes the responses of models in a codec process, with the functions that front ends use for small ones.

As in ``decode.py``: from a header and tensors to the bytes of a body, without I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from conch.core.inference import InferRequest, InferResponse, SharedTensors, ignore
from conch.core.tensors import Buffer
from conch.frontends.offloading.decode import Ask, Result, Work
from conch.frontends.offloading.documents import read_tensors, tensor_documents
from conch.frontends.offloading.memory import Header, split
from conch.wire import compression
from conch.wire.json.generate import Layout, encode_generate, encode_texts
from conch.wire.json.infer import JsonOutputPlan, RequestedOutput, encode_infer
from conch.wire.openai.embeddings import EmbeddingPlan, embedding_body


class _WrittenTarget:
    """The target of an output that the server has already written."""

    def check(self, output: str, size: int) -> None: ...

    def lend(self) -> None: ...

    def write(self, data: Buffer) -> None: ...


def responses_document(
    request: InferRequest, responses: Sequence[InferResponse], parts: list[Buffer]
) -> dict[str, Any]:
    """Return the document of responses to a request, or to requests that differ only in text.

    Appends the data of the responses to ``parts``.
    """
    return {
        "id": request.id,
        "model": request.model_name,
        "version": request.model_version,
        "batch_size": request.batch_size,
        "shared": list(request.shared.output_targets) if request.shared is not None else [],
        "responses": [
            {"outputs": tensor_documents(response.outputs, parts), "parameters": dict(response.parameters)}
            for response in responses
        ],
        "parts": list(map(len, parts)),
    }


def _read_responses(document: dict[str, Any], body: memoryview) -> tuple[InferRequest, list[InferResponse]]:
    request = InferRequest(document["model"], {}, ignore, model_version=document["version"], id=document["id"])
    request.batch_size = document["batch_size"]
    if document["shared"]:
        request.shared = SharedTensors()
        request.shared.output_targets = dict.fromkeys(document["shared"], _WrittenTarget())
    parts = split(body, document["parts"])
    return request, [
        InferResponse(read_tensors(response["outputs"], parts), parameters=response["parameters"])
        for response in document["responses"]
    ]


def infer(header: Header, body: memoryview, ask: Ask) -> Result:
    """Encode the response of ``infer``, compressed with ``encoding``; ``json`` is the size of its JSON (bytes)."""
    request, [response] = _read_responses(header["answer"], body)
    plan = header["plan"]
    outputs = {name: RequestedOutput(*wanted) for name, wanted in plan["outputs"].items()}
    document, blobs = encode_infer(
        request, response, JsonOutputPlan(plan["binary"], plan["batched"], outputs), header["labels"].get
    )
    parts: list[Buffer] = [document, *blobs]
    if header["encoding"] != "identity":
        parts = [compression.compress(parts, header["encoding"])]
    return {"json": len(document), "binary": bool(blobs)}, parts


def generate(header: Header, body: memoryview, ask: Ask) -> Result:
    """Encode the response of ``generate``, or an event of its stream."""
    request, [response] = _read_responses(header["answer"], body)
    return {}, [encode_generate(request, response, Layout[header["layout"]])]


def texts(header: Header, body: memoryview, ask: Ask) -> Result:
    """Encode the response of ``generate`` to several texts."""
    request, responses = _read_responses(header["answer"], body)
    return {}, [encode_texts([request], responses)]


def embeddings(header: Header, body: memoryview, ask: Ask) -> Result:
    """Encode the OpenAI response to a request for embeddings."""
    vectors = split(body, header["parts"])
    return {}, [embedding_body(vectors, EmbeddingPlan(**header["plan"]), header["model"], header["tokens"])]


WORK: Final[Mapping[str, Work]] = {
    "encode infer": infer,
    "encode generate": generate,
    "encode texts": texts,
    "encode embeddings": embeddings,
}
