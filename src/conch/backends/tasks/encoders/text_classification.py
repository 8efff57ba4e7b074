"""The tasks ``text-classification`` and ``zero-shot-classification``: classes of a text or a pair.

Source: transformers' pipelines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from conch.backends.base.arrays import Array, Request, Result, Strings
from conch.backends.tasks.classification import (
    FUNCTION,
    FUNCTIONS,
    apply,
    check_labels,
    check_template,
    checked_choice,
    checked_top_k,
    default_function,
    hypotheses,
    max_labels,
    mislabelled,
    ranked,
)
from conch.backends.tasks.encoders.encoder_task import (
    PAIR,
    TEXT,
    EncodedRequest,
    EncoderTask,
    PaddedBatch,
    stacked,
    texts_of,
)
from conch.backends.tasks.task import OpenEngine, TaskDescription
from conch.checkpoints.activations import softmax
from conch.checkpoints.folder import Checkpoint
from conch.core.errors import invalid
from conch.core.inference import TensorSpec


class TextClassification(EncoderTask):
    """Returns the ``top_k`` labels of each row (default: all); the checkpoint selects softmax or sigmoid."""

    head = "AutoModelForSequenceClassification"

    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        super().__init__(checkpoint, open_engine)
        self.labels = [label.encode() for label in checkpoint.labels or ()]

    @classmethod
    def describe(cls, checkpoint: Checkpoint) -> TaskDescription:
        if FUNCTION in checkpoint.options.extra:
            checked_choice(FUNCTION, checkpoint.options.extra[FUNCTION], FUNCTIONS)
        classes = len(checkpoint.labels or ()) or -1
        return TaskDescription(
            (
                TEXT,
                replace(PAIR, optional=True),
                TensorSpec("top_k", "INT32", (1,), optional=True),
                TensorSpec(FUNCTION, "BYTES", (1,), optional=True),
            ),
            (
                TensorSpec("label", "BYTES", (-1,)),
                TensorSpec("score", "FP32", (-1,)),
                TensorSpec("logits", "FP32", (classes,)),
            ),
        )

    def prepare(self, request: Request) -> EncodedRequest:
        texts = texts_of(request, "text_input")
        pairs = texts_of(request, "text_pair") if request.has("text_pair") else None
        k = self.option(request, "top_k", self.options.top_k or None)
        state = None if k is None else checked_top_k(k, 2**31), self.function(request)
        sequences, truncated = self.encoder.requested(request.parameters).encode(texts, pairs)
        return EncodedRequest(request, sequences, truncated, state)

    def extract(self, outputs: Mapping[str, Array], batch: PaddedBatch) -> Iterable[Any]:
        """Return per sequence the logits, the classes best first and their scores.

        Ranking a whole run at once is faster than ranking each request.
        """
        logits = outputs["logits"]
        classes = logits.shape[1]
        if self.labels and len(self.labels) != classes:
            raise mislabelled(classes, len(self.labels))
        scores = apply(default_function(self.checkpoint.config, classes), logits)
        return zip(logits, *ranked(scores), strict=True)

    def assemble(self, encoded: EncodedRequest, values: list[Any]) -> Result:
        k, function = encoded.state
        if function is not None:
            order, scores = ranked(apply(function, stacked([logits for logits, _, _ in values])))
        else:
            order = stacked([order for _, order, _ in values])
            scores = stacked([scores for _, _, scores in values])
        chosen = order[:, :k]
        labels = self.labels or [f"LABEL_{index}".encode() for index in range(order.shape[1])]
        outputs: dict[str, Any] = {
            "label": Strings(chosen.shape, [labels[index] for index in chosen.ravel().tolist()]),
            "score": scores[:, :k],
        }
        if "logits" in encoded.request.outputs:
            outputs["logits"] = stacked([logits for logits, _, _ in values])
        return Result(outputs)


TEMPLATE = "This example is {}."


class ZeroShotClassification(EncoderTask):
    """Ranks the ``candidate_labels`` of each row, best first, by scoring a hypothesis about the text for each label."""

    head = "AutoModelForSequenceClassification"
    pair = True

    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        entailment = [
            index for index, label in enumerate(checkpoint.labels or ()) if label.lower().startswith("entail")
        ]
        if not entailment:
            raise invalid(
                f"zero-shot-classification needs a class named 'entailment', and '{checkpoint.source}' has "
                f"{', '.join(checkpoint.labels or ()) or 'no classes'}: correct id2label in config.json"
            )
        super().__init__(checkpoint, open_engine)
        self.encoder.room(pair=True)
        self.entailment = entailment[0]
        self.contradiction = -1 if self.entailment == 0 else 0

    @classmethod
    def describe(cls, checkpoint: Checkpoint) -> TaskDescription:
        check_template(checkpoint.options.text("hypothesis_template", TEMPLATE))
        max_labels(checkpoint.options)
        checkpoint.options.flag("multi_label")
        return TaskDescription(
            (
                TEXT,
                TensorSpec("candidate_labels", "BYTES", (-1,)),
                TensorSpec("hypothesis_template", "BYTES", (1,), optional=True),
                TensorSpec("multi_label", "BOOL", (1,), optional=True),
            ),
            (TensorSpec("label", "BYTES", (-1,)), TensorSpec("score", "FP32", (-1,))),
        )

    def prepare(self, request: Request) -> EncodedRequest:
        texts = texts_of(request, "text_input")
        labels = request.texts("candidate_labels")
        count = len(labels) // len(texts) if texts else 0
        if not count or count * len(texts) != len(labels):
            raise invalid(f"input 'candidate_labels' has {len(labels)} labels for {len(texts)} rows; each needs one")
        template = str(self.option(request, "hypothesis_template", TEMPLATE))
        multiple = self.flag(request, "multi_label") or count == 1
        check_labels(count, max_labels(self.options))
        about = [text for text in texts for _ in range(count)]
        sequences, truncated = self.encoder.encode(
            about,
            hypotheses(template, labels, about),
            names=("text_input", "candidate_labels"),
            per_row=count,
            truncation="first",
        )
        return EncodedRequest(request, sequences, truncated, (labels, count, multiple))

    def extract(self, outputs: Mapping[str, Array], batch: PaddedBatch) -> Iterable[Any]:
        return outputs["logits"][:, [self.contradiction, self.entailment]]

    def assemble(self, encoded: EncodedRequest, values: list[Any]) -> Result:
        labels, count, multiple = encoded.state
        logits = stacked(values).reshape(-1, count, 2)
        scores = softmax(logits)[..., 1] if multiple else softmax(logits[..., 1])
        order = np.argsort(scores, axis=1)[:, ::-1]
        at = order + np.arange(len(order))[:, None] * count
        return Result(
            {
                "label": Strings(order.shape, [labels[index] for index in at.ravel().tolist()]),
                "score": np.take_along_axis(scores, order, 1),
            }
        )
