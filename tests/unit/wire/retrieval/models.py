"""Signatures of models for retrieval, and what their responses become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from conch.core.inference import ModelSignature, TensorSpec
from conch.core.tensors import NATIVE_FORMAT, WireTensor, pack_bytes, split_bytes
from conch.wire.openai.reading import ApiError, read_body
from conch.wire.retrieval.endpoints import decode
from conch.wire.retrieval.plans import DecodedRequest, Results

_DATATYPES = {"num_input_tokens": "UINT32", "num_vectors": "UINT32", "sparse_indices": "INT64"}
_TEXT = TensorSpec("text_input", "BYTES", (1,))
_PAIR = TensorSpec("text_pair", "BYTES", (1,))
_COUNT = TensorSpec("num_input_tokens", "UINT32", (1,))


def signature(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], batch: int = 4) -> ModelSignature:
    return ModelSignature("m", 1, batch, {spec.name: spec for spec in inputs}, {spec.name: spec for spec in outputs})


def optional(name: str, datatype: str = "BYTES", dims: tuple[int, ...] = (1,)) -> TensorSpec:
    return TensorSpec(name, datatype, dims, optional=True)


EMBEDDER = signature(
    [_TEXT, optional("token_ids", "INT32", (-1,)), optional("prompt_name"), optional("task")],
    [TensorSpec("embedding", "FP32", (8,)), _COUNT, TensorSpec("tokens", "BYTES", (1,))],
)
#: Of texts and images.
IMAGE_EMBEDDER = signature(
    [optional("text_input"), optional("image"), optional("prompt_name"), optional("task")], [*EMBEDDER.outputs.values()]
)
#: Without prompts, token ids and counts.
PLAIN_EMBEDDER = signature([_TEXT], [TensorSpec("embedding", "FP32", (8,))])
SPARSE = signature([_TEXT], [TensorSpec("sparse_indices", "INT64", (-1,)), TensorSpec("sparse_values", "FP32", (-1,))])
MULTI_VECTOR = signature(
    [_TEXT, optional("task")],
    [TensorSpec("token_embeddings", "FP32", (-1, 2)), TensorSpec("num_vectors", "UINT32", (1,))],
)
RANKER = signature([_TEXT, _PAIR, optional("function_to_apply")], [TensorSpec("score", "FP32", (1,)), _COUNT])
CLASSIFIER = signature(
    [_TEXT, optional("text_pair"), optional("top_k", "INT32"), optional("function_to_apply")],
    [TensorSpec("label", "BYTES", (-1,)), TensorSpec("score", "FP32", (-1,)), TensorSpec("logits", "FP32", (3,))],
)


def decoded(endpoint: str, model: ModelSignature = EMBEDDER, **members: Any) -> DecodedRequest:
    body = json.dumps({"model": "m", **members}).encode()
    return decode(read_body(body), endpoint, "", lambda _: model)


def refusal(endpoint: str, model: ModelSignature = EMBEDDER, **members: Any) -> ApiError:
    """Return the error with which a request is refused."""
    with pytest.raises(ApiError) as caught:
        decoded(endpoint, model, **members)
    return caught.value


def texts(request: DecodedRequest, name: str = "text_input") -> list[list[str]]:
    """The elements of an input in each request to the model."""
    return [[text.decode() for text in split_bytes(inputs[name].data)] for inputs in request.inputs]


def body(request: DecodedRequest, **outputs: Any) -> Any:
    """The response to a request whose model gives ``outputs``: numbers or texts ``[rows, …]`` of all rows together."""
    parts, start = [], 0
    for rows in request.plan.rows:
        part = []
        for name, values in outputs.items():
            array = np.asarray(values)[start : start + rows]
            if array.dtype.kind == "U":
                data, datatype = pack_bytes([text.encode() for text in array.ravel().tolist()]), "BYTES"
            else:
                datatype = _DATATYPES.get(name, "FP32")
                data = array.astype(NATIVE_FORMAT[datatype]).tobytes()
            part.append(WireTensor(name, datatype, array.shape, data))
        parts.append(part)
        start += rows
    return json.loads(request.plan.body("m", Results(request.plan, parts)))
