"""Encodes large responses in a codec process; used in place of the functions of :mod:`conch.wire`.

Runs on the event loop. The functions raise the errors of those functions and of :meth:`Codec.run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import Buffer
from conch.frontends.offloading.encode import responses_document
from conch.frontends.offloading.memory import Header
from conch.frontends.offloading.pool import LARGE, Codec
from conch.server.model import Model
from conch.wire.json.generate import Layout
from conch.wire.json.infer import JsonOutputPlan
from conch.wire.openai.embeddings import EmbeddingPlan


def is_large(*responses: InferResponse) -> bool:
    """Whether the tensors are so large that writing them as JSON, or compressing them, takes long."""
    size = 0
    for response in responses:
        for tensor in response.outputs:
            size += len(tensor.data)
    return size > LARGE


async def encode_infer(
    codec: Codec, request: InferRequest, response: InferResponse, plan: JsonOutputPlan, model: Model, encoding: str
) -> tuple[int, list[memoryview]]:
    """Return the size of the JSON before binary tensors, 0 without them, and the body, compressed."""
    parts: list[Buffer] = []
    classified = [name for name, wanted in plan.outputs.items() if wanted.classification]
    header: Header = {
        "work": "encode infer",
        "answer": responses_document(request, [response], parts),
        "plan": asdict(plan),
        "labels": {name: list(labels) for name in classified if (labels := model.labels(name)) is not None},
        "encoding": encoding,
    }
    result, body = await codec.run(header, parts)
    return result["json"] if result["binary"] else 0, body


async def encode_generate(
    codec: Codec, request: InferRequest, response: InferResponse, layout: Layout
) -> list[memoryview]:
    """Return the response of ``generate``, or an event of its stream."""
    parts: list[Buffer] = []
    answer = responses_document(request, [response], parts)
    return (await codec.run({"work": "encode generate", "answer": answer, "layout": layout.name}, parts))[1]


async def encode_texts(codec: Codec, request: InferRequest, responses: Sequence[InferResponse]) -> list[memoryview]:
    """Return the response of ``generate`` to several texts; ``request`` is the request of the first text."""
    parts: list[Buffer] = []
    answer = responses_document(request, responses, parts)
    return (await codec.run({"work": "encode texts", "answer": answer}, parts))[1]


async def encode_embeddings(
    codec: Codec, vectors: Sequence[memoryview], plan: EmbeddingPlan, model: str, tokens: int
) -> list[memoryview]:
    """Return the OpenAI response to a request for embeddings."""
    header: Header = {
        "work": "encode embeddings",
        "parts": list(map(len, vectors)),
        "plan": asdict(plan),
        "model": model,
        "tokens": tokens,
    }
    return (await codec.run(header, list(vectors)))[1]
