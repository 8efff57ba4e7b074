"""The task ``text-classification``: returns the labels of a text or pair of texts with their scores, best first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from conch.backends.base.arrays import Array, Request, Result, Strings
from conch.backends.tasks.base import OpenEngine, TaskDescription
from conch.backends.tasks.encoders.base import PAIR, TEXT, EncodedRequest, EncoderTask, stacked, texts_of
from conch.backends.tasks.encoders.batch import PaddedBatch
from conch.backends.tasks.scores import (
    FUNCTION,
    apply,
    checked_function,
    checked_top_k,
    default_function,
    mislabelled,
    ranked,
)
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.inference import TensorSpec


class TextClassification(EncoderTask):
    """Returns the ``top_k`` labels of each row (default: all); the checkpoint selects softmax or sigmoid."""

    head = "AutoModelForSequenceClassification"

    def __init__(self, checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> None:
        super().__init__(checkpoint, options, open_engine)
        self.labels = [label.encode() for label in checkpoint.labels or ()]

    @classmethod
    def describe(cls, checkpoint: Checkpoint, options: Options) -> TaskDescription:
        if FUNCTION in options.extra:
            checked_function(options.extra[FUNCTION])
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
        sequences, truncated = self.encoder.encode(texts, pairs)
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
