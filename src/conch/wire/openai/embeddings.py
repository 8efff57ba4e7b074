"""Embeddings: the request with its texts, and a vector for each, as numbers or as base64 of little-endian FP32."""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final

import orjson

from conch.core.errors import internal
from conch.core.inference import InferResponse, ModelSignature
from conch.core.tensors import WireTensor
from conch.wire.json.tensor import to_json
from conch.wire.openai.completions import read_texts
from conch.wire.openai.inputs import text_tensor
from conch.wire.openai.models import PROMPT, embedding_output
from conch.wire.openai.reading import ApiError, Fields, wrong
from conch.wire.openai.sampling import IGNORED

MAX_INPUTS: Final = 2048
_COUNT: Final = "num_input_tokens"


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """The form of the vectors of ``texts`` texts; ``dimensions`` 0 keeps all dimensions."""

    texts: int
    base64: bool
    dimensions: int


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A checked request for embeddings."""

    texts: list[str]
    plan: EmbeddingPlan

    def inputs(self, signature: ModelSignature) -> list[dict[str, WireTensor]]:
        """Return the inputs of the requests to the model, each with as many texts as the model takes at once."""
        spec = signature.inputs[PROMPT]
        output = signature.outputs[embedding_output(signature) or ""]
        size = signature.max_batch_size or (len(self.texts) if spec.dims == (-1,) and len(output.dims) == 2 else 1)
        texts = [text.encode() for text in self.texts]
        return [
            {PROMPT: text_tensor(signature, PROMPT, texts[start : start + size])}
            for start in range(0, len(texts), size)
        ]


def read_embedding(fields: Fields) -> EmbeddingRequest:
    """Read the members of a request, except ``model``. Raises ApiError for invalid or unknown ones."""
    texts = read_texts(fields, "input", MAX_INPUTS)
    form = fields.take("encoding_format")
    if form not in (None, "float", "base64"):
        raise wrong("encoding_format", form, "float or base64")
    dimensions = fields.integer("dimensions", 1, 2**31 - 1)
    fields.ignore(*IGNORED)
    fields.finish()
    return EmbeddingRequest(texts, EmbeddingPlan(len(texts), form == "base64", dimensions or 0))


def wanted_outputs(signature: ModelSignature) -> tuple[str, ...]:
    """Return the outputs to request from the model: the vectors, and the token counts if it has them."""
    outputs = (embedding_output(signature) or "", _COUNT)
    return tuple(name for name in outputs if name in signature.outputs)


class EmbeddingResponse:
    """Collects the vectors of all requests to the model, in the order of the texts."""

    def __init__(self, plan: EmbeddingPlan, signature: ModelSignature, parts: int) -> None:
        self._plan = plan
        self._output = embedding_output(signature)
        self._parts: list[list[memoryview]] = [[] for _ in range(parts)]
        self._tokens: int | None = None

    def add(self, part: int, rows: int, response: InferResponse) -> None:
        """Add the response to request ``part``, which has ``rows`` texts.

        Raises INVALID_ARG if ``dimensions`` exceeds those of the model, INTERNAL for a response that does not fit.
        """
        for tensor in response.outputs:
            if tensor.name == self._output:
                self._parts[part] = self._vectors(tensor, rows)
            elif tensor.name == _COUNT:
                self._tokens = (self._tokens or 0) + sum(to_json(tensor))

    @property
    def tokens(self) -> int:
        """The number of tokens of all texts, 0 if the model does not count them."""
        return self._tokens or 0

    def vectors(self) -> list[memoryview]:
        """Return the vectors of all texts (FP32). Raises INTERNAL if some are missing."""
        vectors = [vector for part in self._parts for vector in part]
        if len(vectors) != self._plan.texts:
            raise internal(f"the model gave {len(vectors)} embeddings for {self._plan.texts} texts")
        return vectors

    def _vectors(self, tensor: WireTensor, rows: int) -> list[memoryview]:
        data = memoryview(bytes(tensor.data))
        size, rest = divmod(len(data), 4 * rows)
        if rest or not size:
            raise internal(f"the model's {tensor.name} of {len(data)} bytes does not hold {rows} vectors")
        if self._plan.dimensions > size:
            raise ApiError(f"'dimensions' is {self._plan.dimensions}; the model has {size}", "dimensions")
        return [data[4 * size * row : 4 * size * (row + 1)] for row in range(rows)]


def embedding_body(vectors: Sequence[memoryview], plan: EmbeddingPlan, model: str, tokens: int) -> bytes:
    """Return the body of a response with these vectors (FP32)."""
    data = [
        {"object": "embedding", "index": index, "embedding": _shown(vector, plan)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return orjson.dumps({"object": "list", "data": data, "model": model, "usage": usage})


def _shown(vector: memoryview, plan: EmbeddingPlan) -> Any:
    if plan.dimensions:
        kept = vector[: 4 * plan.dimensions].cast("f").tolist()
        norm = sqrt(sum([value * value for value in kept]))
        vector = memoryview(array("f", [value / norm for value in kept] if norm else kept)).cast("B")
    return b64encode(vector).decode() if plan.base64 else vector.cast("f").tolist()
