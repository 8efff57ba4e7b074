"""Text to entities: the pipeline ``token-classification``, one JSON document per row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from conch.backends.native.arrays import Array, Request, Result, Strings
from conch.backends.tasks.base import OpenEngine, TaskDescription
from conch.backends.tasks.encoders.base import TEXT, EncodedRequest, EncoderTask, texts_of
from conch.backends.tasks.encoders.batch import PaddedBatch
from conch.backends.tasks.encoders.entities import STRATEGIES, Grouping
from conch.backends.tasks.scores import mislabelled, softmax
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.errors import invalid, unsupported
from conch.inference import TensorSpec


class TokenClassification(EncoderTask):
    """The entities of each row, with their places in the text in characters, grouped by ``aggregation_strategy``."""

    head = "AutoModelForTokenClassification"

    def __init__(self, checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> None:
        super().__init__(checkpoint, options, open_engine)
        if self.encoder.tokenizer.fast is None:
            raise unsupported(f"token-classification needs a tokenizer.json, and '{checkpoint.source}' has none")
        self.labels = checkpoint.labels or []
        self.grouping = Grouping(self.encoder.tokenizer, self.labels)

    @classmethod
    def describe(cls, checkpoint: Checkpoint, options: Options) -> TaskDescription:
        checked_strategy(options.text("aggregation_strategy", "none"))
        return TaskDescription(
            (TEXT, TensorSpec("aggregation_strategy", "BYTES", (1,), optional=True)),
            (TensorSpec("entities", "BYTES", (1,)),),
        )

    def prepare(self, request: Request) -> EncodedRequest:
        texts = texts_of(request, "text_input")
        strategy = checked_strategy(self.option(request, "aggregation_strategy", "none"))
        sequences, truncated = self.encoder.encode(texts, offsets=True)
        return EncodedRequest(request, sequences, truncated, (texts, strategy))

    def extract(self, outputs: Mapping[str, Array], batch: PaddedBatch) -> Iterable[Any]:
        logits = outputs["logits"]
        if logits.shape[-1] != len(self.labels):
            raise mislabelled(logits.shape[-1], len(self.labels))
        return batch.rows(softmax(logits))

    def assemble(self, encoded: EncodedRequest, values: list[Any]) -> Result:
        texts, strategy = encoded.state
        documents = [
            json.dumps(self.grouping.entities(text, item, scores, strategy), ensure_ascii=False)
            for text, item, scores in zip(texts, encoded.sequences, values, strict=True)
        ]
        return Result({"entities": Strings((len(documents), 1), documents)})


def checked_strategy(value: str) -> str:
    """``aggregation_strategy`` as a client or a configuration gave it."""
    if value not in STRATEGIES:
        raise invalid(f"aggregation_strategy is '{value}'; it must be one of {', '.join(STRATEGIES)}")
    return value
