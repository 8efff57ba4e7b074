"""The task ``text-ranking`` (cross-encoders): scores the relevance of a document to a query.

Source of the defaults: sentence-transformers' CrossEncoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from conch.backends.base.arrays import Array, Request, Result
from conch.backends.tasks.base import OpenEngine, TaskDescription
from conch.backends.tasks.encoders.base import PAIR, TEXT, EncodedRequest, EncoderTask, stacked, texts_of
from conch.backends.tasks.encoders.batch import PaddedBatch
from conch.backends.tasks.scores import FUNCTION, apply, checked_function
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import unsupported
from conch.core.inference import TensorSpec


class Rerank(EncoderTask):
    """Scores the relevance of ``text_pair`` (a document) to ``text_input`` (a query) in each row.

    The default function is sigmoid for one class and none for several, unless the checkpoint names another.
    """

    head = "AutoModelForSequenceClassification"
    pair = True

    def __init__(self, checkpoint: Checkpoint, options: Options, open_engine: OpenEngine) -> None:
        super().__init__(checkpoint, options, open_engine)
        self.encoder.room(pair=True)
        self.activation = activation(checkpoint)

    @classmethod
    def describe(cls, checkpoint: Checkpoint, options: Options) -> TaskDescription:
        if FUNCTION in options.extra:
            checked_function(options.extra[FUNCTION])
        classes = len(checkpoint.labels or ()) or 1
        return TaskDescription(
            (TEXT, PAIR, TensorSpec(FUNCTION, "BYTES", (1,), optional=True)),
            (TensorSpec("score", "FP32", (classes,)), TensorSpec("logits", "FP32", (classes,))),
        )

    def prepare(self, request: Request) -> EncodedRequest:
        queries = [text.strip() for text in texts_of(request, "text_input")]
        documents = [text.strip() for text in texts_of(request, "text_pair")]
        function = self.function(request) or self.activation
        sequences, truncated = self.encoder.encode(queries, documents)
        return EncodedRequest(request, sequences, truncated, function)

    def extract(self, outputs: Mapping[str, Array], batch: PaddedBatch) -> Iterable[Any]:
        return outputs["logits"]

    def assemble(self, encoded: EncodedRequest, values: list[Any]) -> Result:
        logits = stacked(values)
        outputs: dict[str, Any] = {"score": apply(encoded.state, logits)}
        if "logits" in encoded.request.outputs:
            outputs["logits"] = logits
        return Result(outputs)


def activation(checkpoint: Checkpoint) -> str:
    """Return the function of a CrossEncoder: from config.json, else by the number of classes.

    Raises UNSUPPORTED for an unknown function in config.json.
    """
    config = checkpoint.config
    settings = config.get("sentence_transformers")
    named = settings.get("activation_fn") if isinstance(settings, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if not named:
        return "sigmoid" if len(checkpoint.labels or ()) <= 1 else "none"
    name = str(named).rpartition(".")[2]
    try:
        return {"Sigmoid": "sigmoid", "Identity": "none", "Softmax": "softmax"}[name]
    except KeyError:
        raise unsupported(
            f"'{checkpoint.source}' names the activation '{named}'; supported are Sigmoid, Identity and Softmax"
        ) from None
