"""Cohere's ``/v2/embed``, ``/v1/embed`` and ``/rerank``; the latter includes Jina's ``/v1/rerank``.

Errors are ``{"message": …}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from conch.core.errors import ConchError
from conch.core.inference import ModelSignature
from conch.core.text_parameters import MAX_PAIR_TOKENS
from conch.wire.json.text import dumps, error_message
from conch.wire.openai.media import IMAGE, image_file
from conch.wire.openai.reading import ApiError, Fields, wrong
from conch.wire.retrieval.inputs import (
    TextOptions,
    checked_text,
    checked_texts,
    counted,
    read_content,
    read_list,
    read_prompt,
    text_inputs,
    text_or_image,
)
from conch.wire.retrieval.models import Kind, kinds, vector_output
from conch.wire.retrieval.openai import SIDES, check_dimensions, truncated
from conch.wire.retrieval.pairs import pair_inputs, pair_scores
from conch.wire.retrieval.plans import (
    DTYPES,
    RELATIVE,
    SCALED,
    Array,
    DecodedRequest,
    Results,
    RetrievalPlan,
    base64,
    document,
    new_id,
    quantized,
    shortened,
)

_SIZES: Final = "output_dimension"


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereEmbedPlan(RetrievalPlan):
    """The ``types`` of the vectors, each with its own list; ``by_type`` False is the older form with one list."""

    version: str
    texts: list[str]
    types: list[str]
    dimensions: int
    by_type: bool

    def body(self, model: str, results: Results) -> bytes:
        vectors = shortened(results.numbers(self.outputs[0]), self.dimensions, member=_SIZES)
        embeddings = {kind: _vectors(vectors, kind) for kind in self.types}
        meta: dict[str, Any] = {
            "api_version": {"version": self.version},
            "billed_units": {"input_tokens": results.tokens},
        }
        if any(kind in SCALED for kind in self.types):
            meta["warnings"] = [RELATIVE]
        return document(
            {
                "id": new_id(),
                "embeddings": embeddings if self.by_type else embeddings["float"],
                "texts": self.texts,
                "meta": meta,
                "response_type": "embeddings_by_type" if self.by_type else "embeddings_floats",
            }
        )


def _vectors(vectors: Array, kind: str) -> Any:
    if kind == "base64":
        return [base64(vector) for vector in vectors]
    return quantized(vectors, kind, member="embedding_types")


def read_embed(fields: Fields, signature: ModelSignature, *, version: str) -> DecodedRequest:
    """Read a request to ``/v1/embed`` or ``/v2/embed``; ``version`` is 1 or 2."""
    member, texts = _texts(fields)
    types = fields.strings("embedding_types")
    for kind in types or ():
        if kind not in (*DTYPES, "base64"):
            raise wrong("embedding_types", kind, f"one of {', '.join(DTYPES)}, base64")
    dimensions = fields.integer(_SIZES, 1, 2**31 - 1) or 0
    # The type of images chooses no prompt.
    options = read_prompt(fields, "input_type")
    if options.prompt_name == IMAGE and not all(isinstance(text, str) for text in texts):
        options = TextOptions()
    side = fields.text("truncate")
    if side is not None and side not in SIDES:
        raise wrong("truncate", side, "NONE, START or END")
    length = fields.integer("max_tokens", 1, 2**31 - 1)
    options = replace(options, truncation=SIDES[side] if side else None, max_length=length)
    fields.ignore("priority")
    fields.finish()
    output = vector_output(signature)
    check_dimensions(signature, dimensions, _SIZES)
    inputs, rows = text_inputs(signature, texts, options, output=output)
    plan = CohereEmbedPlan(
        rows=rows, outputs=counted(signature, output), parameters=options.parameters, members=(member,),
        version=version, texts=[text for text in texts if isinstance(text, str)],
        types=list(dict.fromkeys(types or ["float"])), dimensions=dimensions,
        by_type=version == "2" or types is not None,
    )  # fmt: skip
    return DecodedRequest(plan, inputs)


def _texts(fields: Fields) -> tuple[str, Sequence[str | bytes]]:
    """Take one of ``texts``, ``images`` (data URLs), and ``inputs`` whose contents are texts or images.

    Returns the member's name too.
    """
    given = [member for member in ("texts", "images", "inputs") if fields.has(member)]
    if len(given) > 1:
        raise ApiError(f"'{given[0]}' cannot be combined with '{given[1]}'", given[0])
    member = given[0] if given else "texts"
    listed = read_list(fields, member)
    if member == "images":
        return member, [image_file(item, f"images[{index}]") for index, item in enumerate(listed)]
    if member == "inputs":
        contents = [item.get("content") if type(item) is dict else None for item in listed]
        listed = [read_content(content, f"inputs[{index}].content") for index, content in enumerate(contents)]
    return member, checked_texts(listed, member)


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereRerankPlan(RetrievalPlan):
    """The number of ``pairs``, and of results, at most ``top_n``; ``documents`` are returned (None: only indices)."""

    pairs: int
    documents: Sequence[str | bytes] | None
    top_n: int

    def body(self, model: str, results: Results) -> bytes:
        scores = pair_scores(self.outputs, results, self.pairs)
        ranked = []
        for index in best(scores)[: self.top_n]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if self.documents is not None and isinstance(text := self.documents[index], str):
                result["document"] = {"text": text}
            ranked.append(result)
        tokens = results.tokens
        return document(
            {
                "id": new_id(),
                "model": model,
                "object": "list",
                "results": ranked,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
            }
        )


def best(scores: Array) -> list[int]:
    """Return the indices of FP32 ``[n]`` by score, the best first; equal scores keep their order."""
    return [int(index) for index in np.argsort(-scores, kind="stable")]


def read_rerank(fields: Fields, signature: ModelSignature, *, shows: bool) -> DecodedRequest:
    """Read a request to rank documents.

    ``shows``: the response has the documents by default, as at Jina and unlike at Cohere.
    """
    query = fields.required_text("query")
    documents = [_document(item, index) for index, item in enumerate(read_list(fields, "documents"))]
    top_n = fields.integer("top_n", 1, 2**31 - 1) or len(documents)
    shown = fields.flag("return_documents", shows)
    length = fields.integer("max_tokens_per_doc", 1, 2**31 - 1)
    options = truncated(fields, TextOptions())
    if not fields.flag("truncation", True):
        raise ApiError("'truncation' must be true: long documents are truncated", "truncation")
    named = fields.strings("rank_fields")
    if named not in (None, ["text"]):
        raise wrong("rank_fields", named, '["text"]: documents are texts, or objects with a text')
    fields.refuse("return_embeddings", "max_chunks_per_doc")
    fields.ignore("priority", "user")
    fields.finish()
    kind = Kind.RANKER if Kind.RANKER in kinds(signature) else Kind.MULTI_VECTOR
    inputs, rows, outputs = pair_inputs(signature, [query], documents, TextOptions(), kind)
    plan = CohereRerankPlan(
        rows=rows, outputs=counted(signature, *outputs), members=("query", "documents") if kind is Kind.RANKER else (),
        pairs=len(documents), documents=documents if shown else None, top_n=top_n,
        parameters=options.parameters | ({MAX_PAIR_TOKENS: length} if length is not None else {}),
    )  # fmt: skip
    return DecodedRequest(plan, inputs)


def _document(item: Any, index: int) -> str | bytes:
    path = f"documents[{index}]"
    item = text_or_image(item, path)
    if type(item) is bytes:
        return item
    if type(item) is dict:
        return checked_text(item.get("text"), f"{path}.text")
    if type(item) is not str:
        raise wrong(path, item, "a string or an object with a text")
    return checked_text(item, path)


def error_body(status: int, error: ConchError) -> bytes:
    """Return the body of an error response of Cohere's API."""
    return dumps({"message": error_message(error.public)})
