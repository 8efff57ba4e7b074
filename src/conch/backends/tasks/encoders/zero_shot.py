"""The task ``zero-shot-classification``: scores candidate labels of a text with a network trained on entailment.

Source: transformers' pipeline of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from conch.backends.base.arrays import Array, Request, Result, Strings
from conch.backends.tasks.base import OpenEngine, TaskDescription
from conch.backends.tasks.encoders.base import TEXT, EncodedRequest, EncoderTask, stacked, texts_of
from conch.backends.tasks.encoders.batch import PaddedBatch
from conch.backends.tasks.hypotheses import check_labels, check_template, hypotheses, max_labels
from conch.backends.tasks.scores import softmax
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import invalid
from conch.core.inference import TensorSpec

TEMPLATE = "This example is {}."


class ZeroShotClassification(EncoderTask):
    """Ranks the ``candidate_labels`` of each row, best first, by scoring a hypothesis about the text for each label."""

    head = "AutoModelForSequenceClassification"
    pair = True

    def __init__(self, checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> None:
        entailment = [
            index for index, label in enumerate(checkpoint.labels or ()) if label.lower().startswith("entail")
        ]
        if not entailment:
            raise invalid(
                f"zero-shot-classification needs a class named 'entailment', and '{checkpoint.source}' has "
                f"{', '.join(checkpoint.labels or ()) or 'no classes'}: correct id2label in config.json"
            )
        super().__init__(checkpoint, options, open_engine)
        self.encoder.room(pair=True)
        self.entailment = entailment[0]
        self.contradiction = -1 if self.entailment == 0 else 0

    @classmethod
    def describe(cls, checkpoint: Checkpoint, options: Options) -> TaskDescription:
        check_template(options.text("hypothesis_template", TEMPLATE))
        max_labels(options)
        options.flag("multi_label")
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
