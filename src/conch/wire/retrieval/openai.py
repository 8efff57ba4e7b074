"""OpenAI's ``/v1/embeddings``, with other servers' members for prompts, truncation and datatypes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from conch.core.inference import ModelSignature
from conch.wire.openai.reading import ApiError, Fields, wrong
from conch.wire.openai.sampling import IGNORED
from conch.wire.retrieval.inputs import TextOptions, counted, read_input, read_prompt, text_inputs
from conch.wire.retrieval.models import vector_output
from conch.wire.retrieval.plans import (
    DTYPES,
    DecodedRequest,
    Results,
    RetrievalPlan,
    base64,
    document,
    normalized,
    quantized,
    shortened,
)

#: ``truncate`` of Cohere and NVIDIA: the side of a long text that is cut off.
SIDES: Final = {"NONE": "refuse", "START": "left", "END": "right"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsPlan(RetrievalPlan):
    """The form of the vectors; ``dimensions`` 0 keeps all. ``member`` is the one that chose ``dtype``, for errors."""

    base64: bool
    dimensions: int
    dtype: str
    member: str
    normalize: bool

    def body(self, model: str, results: Results) -> bytes:
        vectors = shortened(results.numbers(self.outputs[0]), self.dimensions)
        if self.normalize:
            vectors = normalized(vectors)
        vectors = quantized(vectors, self.dtype, member=self.member)
        data = [
            {"object": "embedding", "index": index, "embedding": base64(vector) if self.base64 else vector}
            for index, vector in enumerate(vectors)
        ]
        return document({"object": "list", "data": data, "model": model, "usage": usage(results)})


def usage(results: Results) -> dict[str, int]:
    """Return OpenAI's ``usage`` of a request without a completion."""
    tokens = results.tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def read_embeddings(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read the members of a request, except ``model``. Raises ApiError for invalid or unknown ones."""
    members = ("messages",) if fields.has("messages") else ("input",)
    texts = read_input(fields)
    base64_form = read_base64(fields)
    dimensions, (dtype, member, in_base64), options, normalize = 0, ("float", "", False), TextOptions(), False
    if fields.left:  # few requests have other members
        dimensions = fields.integer("dimensions", 1, 2**31 - 1) or 0
        dtype, member, in_base64 = _dtype(fields)
        options = read_options(fields)
        normalize = fields.flag("normalize") | fields.flag("normalized")
        fields.ignore(*IGNORED)
        fields.finish()
    output = vector_output(signature)
    if dimensions:
        check_dimensions(signature, dimensions, "dimensions")
    inputs, rows = text_inputs(signature, texts, options, output=output)
    plan = EmbeddingsPlan(
        rows=rows, outputs=counted(signature, output), parameters=options.parameters,
        members=members, base64=base64_form or in_base64, dimensions=dimensions, dtype=dtype, member=member,
        normalize=normalize,
    )  # fmt: skip
    return DecodedRequest(plan, inputs)


def read_base64(fields: Fields) -> bool:
    """Take ``encoding_format``; return whether it is base64."""
    form = fields.take("encoding_format")
    if form not in (None, "float", "base64"):
        raise wrong("encoding_format", form, "float or base64")
    return bool(form == "base64")


def read_options(fields: Fields) -> TextOptions:
    """Take the members that choose a prompt and truncate texts."""
    options = read_prompt(fields, "input_type", "task")
    side = fields.take("truncate")
    if type(side) is bool:
        # Jina and TEI: false refuses long texts.
        side = None if side else "NONE"
    elif side is not None and (type(side) is not str or side.upper() not in SIDES):
        raise wrong("truncate", side, "NONE, START, END, true or false")
    truncation = SIDES[side.upper()] if side else None
    return truncated(fields, replace(options, truncation=truncation))


def truncated(fields: Fields, options: TextOptions) -> TextOptions:
    """Take vLLM's ``truncate_prompt_tokens`` (-1: as many as the model takes) and ``truncation_side``."""
    tokens = fields.integer("truncate_prompt_tokens", -1, 2**31 - 1)
    if tokens == 0:
        raise wrong("truncate_prompt_tokens", tokens, "-1 or a positive number")
    side = fields.text("truncation_side")
    if side not in (None, "left", "right"):
        raise wrong("truncation_side", side, "left or right")
    if tokens is not None:
        options = replace(options, truncation=options.truncation or "right")
    if side is not None:
        options = replace(options, truncation=side)
    return replace(options, max_length=tokens) if tokens is not None and tokens > 0 else options


def check_dimensions(signature: ModelSignature, dimensions: int, member: str) -> None:
    """Raise ApiError if the vectors of the model are known to have fewer dimensions."""
    size = signature.outputs[vector_output(signature)].dims[-1]
    if 0 <= size < dimensions:
        raise ApiError(f"'{member}' is {dimensions}; the model has {size}", member)


def _dtype(fields: Fields) -> tuple[str, str, bool]:
    """Return the datatype of the vectors, the member that names it, and whether it requests base64."""
    chosen, named, in_base64 = "float", "", False
    for member in ("embedding_type", "output_dtype"):
        value: Any = fields.take(member)
        if type(value) is list and len(value) == 1:
            value = value[0]
        if value is None:
            continue
        if named:
            raise ApiError(f"'{member}' cannot be combined with '{named}'", member)
        if value == "base64":
            value, in_base64 = "float", True
        if value not in DTYPES:
            raise wrong(member, value, f"one of {', '.join(DTYPES)}")
        chosen, named = value, member
    return chosen, named, in_base64
