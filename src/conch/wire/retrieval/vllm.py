"""vLLM's ``/score``, ``/classify``, ``/pooling``, ``/tokenize`` and ``/detokenize``, with OpenAI's error object."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import time
from typing import Any, Final

import numpy as np
import orjson

from conch.core.errors import internal
from conch.core.inference import ModelSignature
from conch.core.tensors import WireTensor
from conch.wire.openai.chat import TEMPLATE_VALUES, file_inputs, read_messages
from conch.wire.openai.inputs import text_tensor
from conch.wire.openai.models import MESSAGES
from conch.wire.openai.reading import ApiError, Fields, wrong
from conch.wire.openai.sampling import IGNORED
from conch.wire.openai.tool_calls import read_tools
from conch.wire.retrieval.inputs import (
    MAX_TEXTS,
    MAX_TOKEN,
    TOO_MANY,
    TextOptions,
    checked_tokens,
    counted,
    read_input,
    read_texts,
    text_inputs,
)
from conch.wire.retrieval.models import (
    HIDDEN_STATE,
    LABEL,
    LOGITS,
    SCORE,
    TOKENS,
    VECTORS,
    Kind,
    kinds,
    vector_output,
    vectors_outputs,
)
from conch.wire.retrieval.openai import check_dimensions, read_base64, read_options, truncated, usage
from conch.wire.retrieval.pairs import multi_vectors, pair_inputs, pair_scores
from conch.wire.retrieval.plans import (
    Array,
    DecodedRequest,
    Results,
    RetrievalPlan,
    base64,
    document,
    new_id,
    shortened,
)

#: The input of a classifier that limits the number of classes in its response.
TOP_K: Final = "top_k"
#: The kinds of models whose pairs have scores.
SCORED: Final = (Kind.RANKER, Kind.DENSE, Kind.MULTI_VECTOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresPlan(RetrievalPlan):
    """The scores of ``pairs`` pairs."""

    pairs: int

    def body(self, model: str, results: Results) -> bytes:
        scores = pair_scores(self.outputs, results, self.pairs)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return document(_listed(model, "score", data, results))


def _listed(model: str, prefix: str, data: list[Any], results: Results) -> dict[str, Any]:
    return {
        "id": new_id(f"{prefix}-"),
        "object": "list",
        "created": int(time()),
        "model": model,
        "data": data,
        "usage": usage(results),
    }


def read_score(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/score``: ``text_1`` and ``text_2``, or ``queries`` and ``documents``.

    One first text is compared with every second one; otherwise both have the same number.
    """
    names = ("queries", "documents") if fields.has("queries") else ("text_1", "text_2")
    firsts, seconds = (read_texts(fields, name) for name in names)
    if len(firsts) not in (1, len(seconds)):
        raise ApiError(
            f"'{names[0]}' has {len(firsts)} texts and '{names[1]}' {len(seconds)}: '{names[0]}' must have one, or "
            "the same number",
            names[0],
        )
    kind = next(kind for kind in kinds(signature) if kind in SCORED)
    if kind is not Kind.RANKER and len(firsts) + len(seconds) > MAX_TEXTS:
        raise ApiError(
            f"'{names[0]}' and '{names[1]}' have {len(firsts) + len(seconds)} texts; at most {MAX_TEXTS} are allowed",
            names[1],
            reason=TOO_MANY,
        )
    options = truncated(fields, TextOptions())
    fields.ignore(*IGNORED)
    fields.finish()
    inputs, rows, outputs = pair_inputs(signature, firsts, seconds, options, kind)
    plan = ScoresPlan(
        rows=rows, outputs=counted(signature, *outputs), parameters=options.parameters,
        members=names if kind is Kind.RANKER else (), pairs=len(seconds),
    )  # fmt: skip
    return DecodedRequest(plan, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassesPlan(RetrievalPlan):
    """The best label of each text, and the scores of all in the order of the classes."""

    def body(self, model: str, results: Results) -> bytes:
        best = results.numbers(SCORE).argmax(1)
        labels = [row[index] for row, index in zip(results.texts(LABEL), best, strict=True)]
        data = [
            {"index": index, "label": label, "probs": scores, "num_classes": len(scores)}
            for index, (label, scores) in enumerate(zip(labels, by_class(self, results), strict=True))
        ]
        return document(_listed(model, "classify", data, results))


def by_class(plan: RetrievalPlan, results: Results) -> Array:
    """Return the scores of a classifier, FP32 ``[n, classes]``, in the order of its classes, or else of their names.

    The logits have the order of the classes, and sort the classes as the scores do, which are given best first. A model
    without logits does not declare an order. Raises INTERNAL for scores that are not those of all classes.
    """
    scores = results.numbers(SCORE)
    if LOGITS in plan.outputs:
        logits = results.numbers(LOGITS)
        if logits.shape != scores.shape:
            raise internal(f"the model gave {scores.shape[1]} scores for {logits.shape[1]} classes")
        ranks = np.argsort(np.argsort(-logits, axis=1, kind="stable"), axis=1)
    else:
        labels = results.texts(LABEL)
        names = sorted(labels[0])
        if len(set(names)) != scores.shape[1] or any(sorted(row) != names for row in labels):
            raise internal("the model did not give one score for each of the same labels for every text")
        ranks = np.array([[row.index(name) for name in names] for row in labels])
    return np.take_along_axis(scores, ranks, axis=1)


def _classified(signature: ModelSignature) -> tuple[str, ...]:
    """Return the outputs of a classifier that ``by_class`` reads."""
    return (LABEL, SCORE, LOGITS) if LOGITS in signature.outputs else (LABEL, SCORE)


def add_top_k(signature: ModelSignature, inputs: list[dict[str, WireTensor]], rows: list[int], top: int) -> None:
    """Request the ``top`` best classes of each text from a model with the input for it."""
    for tensors, count in zip(inputs, rows, strict=True):
        shape, size = ((count, 1), count) if signature.max_batch_size else ((1,), 1)
        tensors[TOP_K] = WireTensor(TOP_K, "INT32", shape, top.to_bytes(4, "little") * size)


def _add_all_classes(signature: ModelSignature, inputs: list[dict[str, WireTensor]], rows: list[int]) -> None:
    """Request all classes, because the model's own ``top_k`` may leave some out."""
    if TOP_K in signature.inputs:
        add_top_k(signature, inputs, rows, MAX_TOKEN)


def read_classify(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/classify``."""
    texts = read_texts(fields, "input")
    options = truncated(fields, TextOptions())
    fields.ignore(*IGNORED)
    fields.finish()
    inputs, rows = text_inputs(signature, texts, options, output=SCORE)
    _add_all_classes(signature, inputs, rows)
    outputs = counted(signature, *_classified(signature))
    plan = ClassesPlan(rows=rows, outputs=outputs, parameters=options.parameters, members=("input",))
    return DecodedRequest(plan, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingPlan(RetrievalPlan):
    """The output of the model for each text: its vector or vectors, or the scores of its classes."""

    base64: bool
    dimensions: int

    def body(self, model: str, results: Results) -> bytes:
        rows: Iterable[Array]
        if self.outputs[0] in (VECTORS, HIDDEN_STATE):
            rows = multi_vectors(results, *self.outputs[:2])
        elif LABEL in self.outputs:
            rows = by_class(self, results)
        else:
            rows = shortened(results.numbers(self.outputs[0]), self.dimensions)
        data = [
            {"index": index, "object": "pooling", "data": base64(row) if self.base64 else row}
            for index, row in enumerate(rows)
        ]
        return document(_listed(model, "pool", data, results))


def read_pooling(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/pooling``; ``task`` may name what the model does anyway."""
    members = ("messages",) if fields.has("messages") else ("input",)
    texts = read_input(fields)
    task = fields.text("task")
    tasks = {
        name: outputs
        for kind, name, outputs in (
            (Kind.DENSE, "embed", (vector_output(signature),)),
            (Kind.MULTI_VECTOR, "token_embed", vectors_outputs(signature)),
            (Kind.TOKEN_VECTORS, "token_embed", vectors_outputs(signature)),
            (Kind.CLASSIFIER, "classify", _classified(signature)),
        )
        if kind in kinds(signature)
    }
    if task is None:
        task = next(iter(tasks))
    elif task not in tasks:
        raise wrong("task", task, f"one of {', '.join(tasks)}")
    in_base64 = read_base64(fields)
    dimensions = fields.integer("dimensions", 1, 2**31 - 1) or 0
    options = read_options(fields)
    fields.ignore(*IGNORED)
    fields.finish()
    if task == "embed":
        check_dimensions(signature, dimensions, "dimensions")
    elif dimensions:
        raise ApiError(f"'dimensions' does not apply to the task {task}", "dimensions")
    outputs = tasks[task]
    inputs, rows = text_inputs(signature, texts, options, output=outputs[0])
    if task == "classify":
        _add_all_classes(signature, inputs, rows)
    plan = PoolingPlan(
        rows=rows, outputs=counted(signature, *outputs), parameters=options.parameters, members=members,
        base64=in_base64, dimensions=dimensions,
    )  # fmt: skip
    return DecodedRequest(plan, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensPlan(RetrievalPlan):
    """The token ids of a text, and the tokens as written in the vocabulary if ``strings`` is set."""

    strings: bool

    def body(self, model: str, results: Results) -> bytes:
        tokens = orjson.loads(results.texts(TOKENS)[0][0])
        strings = tokens["tokens"] if self.strings else None
        limit = tokens["max_length"]
        return document(
            {"count": len(tokens["ids"]), "max_model_len": limit, "tokens": tokens["ids"], "token_strs": strings}
        )


def read_tokenize(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/tokenize`` with ``prompt``, or with the ``messages`` of a chat."""
    chat = fields.has("messages")
    inputs = [_chat_inputs(fields, signature)] if chat else None
    if inputs is None:
        if type(text := fields.required("prompt")) is not str:
            raise wrong("prompt", text, "a string")
        inputs = text_inputs(signature, [text], TextOptions(), output=TOKENS)[0]
    special = fields.flag("add_special_tokens", not chat)
    strings = fields.flag("return_token_strs")
    fields.finish()
    plan = TokensPlan(
        rows=[1], outputs=(TOKENS,), parameters={"add_special_tokens": special}, members=("prompt",),
        strings=strings,
    )  # fmt: skip
    return DecodedRequest(plan, inputs)


def _chat_inputs(fields: Fields, signature: ModelSignature) -> dict[str, WireTensor]:
    """Take the messages of a chat, its tools and the values for the chat template."""
    if MESSAGES not in signature.inputs:
        raise ApiError(f"model '{signature.name}' has no chat template: send 'prompt'", MESSAGES)
    messages, files = read_messages(fields)
    texts = {MESSAGES: messages}
    tools = read_tools(fields).offered
    template = fields.take(TEMPLATE_VALUES) or {}
    if type(template) is not dict:
        raise wrong(TEMPLATE_VALUES, template, "an object")
    if not fields.flag("add_generation_prompt", True):
        template = {**template, "add_generation_prompt": False}
    fields.refuse("chat_template", "continue_final_message", "mm_processor_kwargs")
    for name, value in (("tools", tools), (TEMPLATE_VALUES, orjson.dumps(template) if template else None)):
        if value is not None:
            if name not in signature.inputs:
                raise ApiError(f"model '{signature.name}' has no input for '{name}'", name)
            texts[name] = value
    inputs = {name: text_tensor(signature, name, [value]) for name, value in texts.items()}
    return inputs | file_inputs(signature, files)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizePlan(RetrievalPlan):
    """The text of token ids."""

    def body(self, model: str, results: Results) -> bytes:
        return document({"prompt": orjson.loads(results.texts(TOKENS)[0][0])["decoded"]})


def read_detokenize(fields: Fields, signature: ModelSignature) -> DecodedRequest:
    """Read a request to ``/detokenize``."""
    tokens = checked_tokens(fields.required("tokens"), "tokens")
    fields.finish()
    plan = DetokenizePlan(rows=[1], outputs=(TOKENS,), parameters={"skip_special_tokens": False}, members=("tokens",))
    return DecodedRequest(plan, text_inputs(signature, [tokens], TextOptions(), output=TOKENS)[0])
