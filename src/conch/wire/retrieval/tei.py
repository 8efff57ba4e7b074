"""The routes of text-embeddings-inference (TEI). Errors are ``{"error": …, "error_type": …}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from conch import __version__
from conch.core.errors import QUEUE_FULL, Code, ConchError
from conch.core.inference import ModelSignature
from conch.core.tensors import WireTensor
from conch.core.text_parameters import REFUSE, TRUNCATION
from conch.wire.compression import UNDECODABLE, UNSUPPORTED_ENCODING
from conch.wire.json.text import dumps, error_message
from conch.wire.openai.inputs import text_tensor
from conch.wire.openai.reading import ApiError, Fields, wrong
from conch.wire.retrieval.cohere import best
from conch.wire.retrieval.inputs import (
    EMPTY,
    MAX_TEXTS,
    PROMPT_NAME,
    TOO_MANY,
    TextOptions,
    check_count,
    checked_texts,
    checked_tokens,
    empty,
    read_list,
    read_texts,
    read_texts_or_tokens,
    text_inputs,
)
from conch.wire.retrieval.models import (
    INDICES,
    LABEL,
    PAIR,
    SCORE,
    TEI_ROUTES,
    TOKENS,
    VALUES,
    Kind,
    kinds,
    require,
    vector_output,
    vectors_outputs,
)
from conch.wire.retrieval.openai import check_dimensions
from conch.wire.retrieval.pairs import cosines, multi_vectors, pair_inputs
from conch.wire.retrieval.plans import DecodedRequest, Results, RetrievalPlan, document, normalized, shortened
from conch.wire.retrieval.vllm import TOP_K, add_top_k

#: The input that selects how a classifier or reranker converts logits to scores.
FUNCTION: Final = "function_to_apply"
#: The member with the texts, for errors of models.
_INPUTS: Final = ("inputs",)


def _read_options(fields: Fields) -> TextOptions:
    """Take the members on prompts and truncation; without ``truncate``, the model decides about long texts.

    The prompts ``query`` and ``document`` also select the modules and limits of a model for that task.
    """
    name = fields.text(PROMPT_NAME)
    if name is None:
        return _truncated(fields, TextOptions())
    members = {PROMPT_NAME: fields.name(PROMPT_NAME)}
    task = name if name in ("query", "document") else None
    return _truncated(fields, TextOptions(prompt_name=name, task=task, members=members))


def _truncated(fields: Fields, options: TextOptions) -> TextOptions:
    side = fields.text("truncation_direction")
    if side is not None and side.lower() not in ("left", "right"):
        path = fields.name("truncation_direction")
        raise wrong(path, side, "Left or Right")
    # Only a false that is sent counts: Fields.flag would read a missing one as the default.
    if fields.has("truncate") and not fields.flag("truncate"):
        return replace(options, truncation=REFUSE)
    fields.ignore("truncate")
    return replace(options, truncation=side.lower()) if side is not None else options


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedPlan(RetrievalPlan):
    """The vectors, of length 1 with ``normalize``; ``dimensions`` 0 keeps all."""

    dimensions: int
    normalize: bool

    def body(self, model: str, results: Results) -> bytes:
        vectors = results.numbers(self.outputs[0])
        if self.dimensions:
            whole = vectors[:, : self.dimensions]
            vectors = shortened(vectors, self.dimensions) if self.normalize else whole
        elif self.normalize:
            vectors = normalized(vectors)
        return document(list(vectors))


def read_embed(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/embed``."""
    texts = read_texts_or_tokens(fields, "inputs")
    options = _read_options(fields)
    normalize = fields.flag("normalize", True)
    dimensions = fields.integer("dimensions", 1, 2**31 - 1) or 0
    if (form := fields.text("encoding_format")) not in (None, "float"):
        raise wrong("encoding_format", form, "float")
    fields.finish()
    output = vector_output(signature)
    check_dimensions(signature, dimensions, "dimensions")
    inputs, rows = text_inputs(signature, texts, options, output=output)
    plan = EmbedPlan(
        rows=rows, outputs=(output,), parameters=options.parameters, members=_INPUTS, dimensions=dimensions,
        normalize=normalize,
    )  # fmt: skip
    return DecodedRequest(plan, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsePlan(RetrievalPlan):
    """The elements of sparse vectors that are not zero, by ascending index."""

    def body(self, model: str, results: Results) -> bytes:
        rows = zip(results.ragged(INDICES), results.ragged(VALUES), strict=True)
        return document(
            [
                [
                    {"index": index, "value": value}
                    for index, value in zip(indices.tolist(), values.tolist(), strict=True)
                    if index >= 0
                ]
                for indices, values in rows
            ]
        )


def read_embed_sparse(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/embed_sparse``."""
    inputs, rows, options = _read_inputs(fields, signature, INDICES)
    plan = SparsePlan(rows=rows, outputs=(INDICES, VALUES), parameters=options.parameters, members=_INPUTS)
    return DecodedRequest(plan, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedAllPlan(RetrievalPlan):
    """The vectors of each text."""

    def body(self, model: str, results: Results) -> bytes:
        return document(multi_vectors(results, *self.outputs))


def read_embed_all(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/embed_all``."""
    outputs = vectors_outputs(signature)
    inputs, rows, options = _read_inputs(fields, signature, outputs[0])
    plan = EmbedAllPlan(rows=rows, outputs=outputs, parameters=options.parameters, members=_INPUTS)
    return DecodedRequest(plan, inputs)


def _read_inputs(
    fields: Fields, signature: ModelSignature, output: str
) -> tuple[list[dict[str, WireTensor]], list[int], TextOptions]:
    texts = read_texts_or_tokens(fields, "inputs")
    options = _read_options(fields)
    fields.finish()
    return *text_inputs(signature, texts, options, output=output), options


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankPlan(RetrievalPlan):
    """The scores of all texts, the best first, with the ``texts`` if they are to be returned."""

    texts: list[str] | None

    def body(self, model: str, results: Results) -> bytes:
        scores = results.numbers(SCORE)[:, 0]
        ranked = []
        for index in best(scores):
            result: dict[str, Any] = {"index": index, "score": scores[index]}
            if self.texts is not None:
                result["text"] = self.texts[index]
            ranked.append(result)
        return document(ranked)


def read_rerank(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/rerank`` with ``texts``. The scores are in 0 to 1 unless ``raw_scores`` is true."""
    query = fields.text("query")
    if query is None:
        raise fields.missing("query")
    if not query:
        raise empty("query")
    texts = read_texts(fields, "texts")
    raw = fields.flag("raw_scores")
    shown = fields.flag("return_text")
    options = _truncated(fields, TextOptions())
    fields.finish()
    inputs, rows, _ = pair_inputs(signature, [query], texts, options, Kind.RANKER)
    _apply(signature, inputs, rows, "none" if raw else "sigmoid", raw=raw)
    plan = RerankPlan(
        rows=rows, outputs=(SCORE,), parameters=options.parameters, members=("query", "texts"),
        texts=texts if shown else None,
    )  # fmt: skip
    return DecodedRequest(plan, inputs)


def _apply(
    signature: ModelSignature,
    inputs: list[dict[str, WireTensor]],
    rows: list[int],
    function: str,
    *,
    raw: bool,
) -> None:
    """Add the function that converts logits to scores; a model without the input can only return its own scores."""
    if FUNCTION not in signature.inputs:
        if raw:
            raise ApiError(f"model '{signature.name}' does not return raw scores", "raw_scores")
        return
    for tensors, count in zip(inputs, rows, strict=True):
        tensors[FUNCTION] = text_tensor(signature, FUNCTION, [function.encode()] * count)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictPlan(RetrievalPlan):
    """The classes of each text with their scores, the best first; ``single`` is a request without a list."""

    single: bool

    def body(self, model: str, results: Results) -> bytes:
        rows = [
            [{"score": score, "label": label} for label, score in zip(labels, scores, strict=True)]
            for labels, scores in zip(results.texts(LABEL), results.numbers(SCORE), strict=True)
        ]
        return document(rows[0] if self.single else rows)


def read_predict(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/predict``: a text, a pair of texts, or a list of lists of one or two texts."""
    firsts, seconds, single = _read_predict_inputs(fields)
    further = fields.object("parameters") or Fields({}, "parameters")
    raw, options = fields.flag("raw_scores"), _truncated(fields, TextOptions())
    function = further.text(FUNCTION)
    if function not in (None, "sigmoid", "softmax", "none"):
        raise wrong(further.name(FUNCTION), function, "sigmoid, softmax or none")
    raw |= further.flag("raw_scores")
    top = further.integer(TOP_K, 1, 2**31 - 1)
    further.finish()
    fields.finish()
    if seconds is not None and PAIR not in signature.inputs:
        raise ApiError(f"model '{signature.name}' takes no pairs of texts", "inputs")
    inputs, rows = text_inputs(signature, firsts, options, output=SCORE, pairs=seconds)
    if raw or function is not None:
        _apply(signature, inputs, rows, function or "none", raw=True)
    if top is not None:
        if TOP_K not in signature.inputs:
            raise ApiError(f"model '{signature.name}' takes no '{TOP_K}'", further.name(TOP_K))
        add_top_k(signature, inputs, rows, top)
    plan = PredictPlan(rows=rows, outputs=(LABEL, SCORE), parameters=options.parameters, members=_INPUTS, single=single)
    return DecodedRequest(plan, inputs)


def _read_predict_inputs(fields: Fields) -> tuple[list[str], list[str] | None, bool]:
    """Return the first texts, the second ones (None without pairs), and whether the request is for one text."""
    listed = read_list(fields, "inputs")
    single = type(listed[0]) is not list
    if single:
        listed = [listed]
    pairs = [checked_texts(item if type(item) is list else [item], f"inputs[{row}]") for row, item in enumerate(listed)]
    size = len(pairs[0])
    if size not in (1, 2) or any(len(pair) != size for pair in pairs):
        raise ApiError("'inputs' must be a text, a pair of texts, or a list of lists of one text or of two", "inputs")
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs] if size == 2 else None, single


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarityPlan(RetrievalPlan):
    """The cosines of the first text with each of the others."""

    def body(self, model: str, results: Results) -> bytes:
        vectors = normalized(results.numbers(self.outputs[0]))
        return document(list(cosines(vectors[:1], vectors[1:])))


def read_similarity(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/similarity``: ``inputs`` has a ``source_sentence`` and ``sentences``."""
    members = fields.object("inputs")
    if members is None:
        raise fields.missing("inputs")
    source = members.text("source_sentence")
    if not source:
        raise members.missing("source_sentence") if source is None else empty("inputs.source_sentence")
    sentences = read_texts(members, "sentences", MAX_TEXTS - 1)
    members.finish()
    further = fields.object("parameters") or Fields({}, "parameters")
    options = _read_options(further)
    further.finish()
    fields.finish()
    output = vector_output(signature)
    inputs, rows = text_inputs(signature, [source, *sentences], options, output=output)
    plan = SimilarityPlan(rows=rows, outputs=(output,), parameters=options.parameters, members=_INPUTS)
    return DecodedRequest(plan, inputs)


def read_root(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/``, which runs the model's own task; a source sentence requests similarities."""
    readers = {
        Kind.DENSE: read_embed, Kind.SPARSE: read_embed_sparse, Kind.MULTI_VECTOR: read_embed_all,
        Kind.RANKER: read_rerank, Kind.CLASSIFIER: read_predict,
    }  # fmt: skip
    if fields.is_object("inputs"):
        require(signature, (Kind.DENSE,), TEI_ROUTES)
        return read_similarity(fields, signature)
    return readers[next(kind for kind in kinds(signature) if kind in readers)](fields, signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizePlan(RetrievalPlan):
    """The tokens of each text; special tokens have no place in the text."""

    def body(self, model: str, results: Results) -> bytes:
        return document([_token_objects(orjson.loads(row[0])) for row in results.texts(TOKENS)])


def _token_objects(tokens: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns = (tokens[name] for name in ("ids", "tokens", "texts", "special", "starts", "stops"))
    return [
        {
            "id": id,
            "text": token if special else text,
            "special": bool(special),
            "start": None if special else start,
            "stop": None if special else stop,
        }
        for id, token, text, special, start, stop in zip(*columns, strict=True)
    ]


def read_tokenize(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/tokenize`` with ``inputs``."""
    texts = read_texts(fields, "inputs")
    special = fields.flag("add_special_tokens", True)
    name = fields.text(PROMPT_NAME)
    fields.finish()
    options = TextOptions(prompt_name=name, members={PROMPT_NAME: PROMPT_NAME})
    inputs, rows = text_inputs(signature, texts, options, output=TOKENS)
    plan = TokenizePlan(rows=rows, outputs=(TOKENS,), parameters={"add_special_tokens": special}, members=_INPUTS)
    return DecodedRequest(plan, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan(RetrievalPlan):
    """The texts of token ids."""

    def body(self, model: str, results: Results) -> bytes:
        return document([orjson.loads(row[0])["decoded"] for row in results.texts(TOKENS)])


def read_decode(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/decode``: the ``ids`` of one text, or of several."""
    value = fields.required("ids")
    listed = value if type(value) is list and value and type(value[0]) is list else [value]
    check_count(listed, "ids")
    ids = [checked_tokens(tokens, "ids" if len(listed) == 1 else f"ids[{row}]") for row, tokens in enumerate(listed)]
    skip = fields.flag("skip_special_tokens", True)
    fields.finish()
    inputs, rows = text_inputs(signature, ids, TextOptions(), output=TOKENS)
    plan = DecodePlan(rows=rows, outputs=(TOKENS,), parameters={"skip_special_tokens": skip}, members=("ids",))
    return DecodedRequest(plan, inputs)


_MODEL_TYPES: Final = {
    Kind.DENSE: "embedding",
    Kind.SPARSE: "embedding",
    Kind.MULTI_VECTOR: "embedding",
    Kind.RANKER: "reranker",
    Kind.CLASSIFIER: "classifier",
}


def info_body(signature: ModelSignature, facts: Mapping[str, str]) -> bytes:
    """Return the body of ``/info``; ``facts`` are the runtime facts of the model."""
    kind = next((kind for kind in kinds(signature) if kind in _MODEL_TYPES), None)
    limits = {
        name: int(facts[name]) if facts.get(name, "").isdigit() else None for name in ("max_length", "max_batch_tokens")
    }
    return document(
        {
            "model_id": signature.name,
            "model_sha": None,
            "model_dtype": facts.get("precision", "float32"),
            "model_type": {_MODEL_TYPES[kind]: {}} if kind is not None else {},
            "max_concurrent_requests": None,
            "max_input_length": limits["max_length"],
            "max_batch_tokens": limits["max_batch_tokens"],
            "max_batch_requests": signature.max_batch_size or None,
            "max_client_batch_size": MAX_TEXTS,
            "auto_truncate": facts.get(TRUNCATION) != REFUSE,
            "tokenization_workers": 1,
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
    )


#: TEI's types of errors and their statuses, by error code. A model refuses texts that are too long as INVALID_ARG.
_ERRORS: Final = {
    Code.UNKNOWN: ("Backend", 424),
    Code.INTERNAL: ("Backend", 424),
    Code.NOT_FOUND: ("Validation", 404),
    Code.INVALID_ARG: ("Validation", 413),
    Code.UNAVAILABLE: ("Unhealthy", 503),
    Code.UNSUPPORTED: ("Backend", 424),
    Code.ALREADY_EXISTS: ("Validation", 422),
    Code.CANCELLED: ("Overloaded", 429),
}
#: The same for the reasons of errors in a request, which take precedence.
_ERROR_REASONS: Final = {
    EMPTY: ("Empty", 400), TOO_MANY: ("Validation", 413), UNDECODABLE: ("Validation", 400),
    UNSUPPORTED_ENCODING: ("Validation", 415),
}  # fmt: skip


def status_of(error: ConchError) -> int:
    """Return the HTTP status of an error of TEI."""
    return _kind_of(error)[1]


def error_body(status: int, error: ConchError) -> bytes:
    """Return the body of an error response of TEI."""
    return dumps({"error": error_message(error.public), "error_type": _kind_of(error)[0]})


def _kind_of(error: ConchError) -> tuple[str, int]:
    if error.reason in _ERROR_REASONS:
        return _ERROR_REASONS[error.reason]
    if error.code is Code.INVALID_ARG and (isinstance(error, ApiError) or error.param is not None):
        return "Validation", 422
    if error.code is Code.UNAVAILABLE and QUEUE_FULL in error.message:
        return "Overloaded", 429
    if error.code is Code.INVALID_ARG and "cannot be tokenised" in error.message:
        return "Tokenizer", 422
    return _ERRORS[error.code]
