"""The task ``fill-mask``: predicts the most probable tokens for the mask tokens of a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array, Request, Result, Strings
from conch.backends.tasks.classification import checked_top_k
from conch.backends.tasks.encoders.encoder_task import TEXT, EncodedRequest, EncoderTask, PaddedBatch, texts_of
from conch.backends.tasks.task import OpenEngine, TaskDescription
from conch.checkpoints.activations import softmax
from conch.checkpoints.folder import Checkpoint
from conch.core.errors import invalid
from conch.core.inference import TensorSpec

TOP_K: Final = 5

#: The maximum size in bytes of the logits of one run, which cover the whole vocabulary for each token.
LOGITS: Final = 64 << 20


class FillMask(EncoderTask):
    """Returns the ``top_k`` tokens for each mask, in the order of the masks, and the text with the best token in each.

    All rows of a request must have the same number of masks, because their results share a shape.
    """

    head = "AutoModelForMaskedLM"

    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        super().__init__(checkpoint, open_engine)
        if self.tokenizer.special.mask_id is None:
            raise invalid(f"fill-mask needs a tokenizer with a mask token, which '{checkpoint.source}' does not have")
        self.mask_id: int = self.tokenizer.special.mask_id
        self.mask_token = self.tokenizer.token(self.mask_id)
        vocabulary = int(checkpoint.config.get("vocab_size") or 32768)
        self.vocabulary = vocabulary
        self.budget = max(1, min(self.budget, LOGITS // (4 * vocabulary)))

    @classmethod
    def describe(cls, checkpoint: Checkpoint) -> TaskDescription:
        return TaskDescription(
            (TEXT, TensorSpec("top_k", "INT32", (1,), optional=True)),
            (
                TensorSpec("label", "BYTES", (-1,)),
                TensorSpec("score", "FP32", (-1,)),
                TensorSpec("text_output", "BYTES", (1,)),
            ),
        )

    def prepare(self, request: Request) -> EncodedRequest:
        texts = texts_of(request, "text_input")
        k = checked_top_k(self.option(request, "top_k", self.options.top_k or TOP_K), self.vocabulary)
        sequences, truncated = self.encoder.encode(texts)
        masks = [int(np.count_nonzero(item.ids == self.mask_id)) for item in sequences]
        for row, count in enumerate(masks):
            if not count:
                raise invalid(f"input 'text_input' has no {self.mask_token} in row {row}; fill-mask needs one")
            if count != masks[0]:
                raise invalid(
                    f"input 'text_input' has {count} times {self.mask_token} in row {row} and {masks[0]} times in "
                    "row 0; the rows of a request must have the same number"
                )
        return EncodedRequest(request, sequences, truncated, k)

    def extract(self, outputs: Mapping[str, Array], batch: PaddedBatch) -> Iterable[Any]:
        logits = outputs["logits"]
        values = []
        for row, (item, owner) in enumerate(zip(batch.sequences, batch.requests, strict=True)):
            scores = softmax(logits[row, np.flatnonzero(item.ids == self.mask_id)])
            values.append(best(scores, min(owner.state, scores.shape[1])))
        return values

    def assemble(self, encoded: EncodedRequest, values: list[Any]) -> Result:
        tokens: list[str] = []
        texts: list[str] = []
        for item, (ids, _) in zip(encoded.sequences, values, strict=True):
            tokens.extend(
                self.tokenizer.decode([token], skip_special_tokens=False, clean_up=True)
                for token in ids.ravel().tolist()
            )
            filled = item.ids.copy()
            filled[filled == self.mask_id] = ids[:, 0]
            texts.append(self.tokenizer.decode(filled.tolist(), clean_up=True))
        scores = np.stack([row_scores.ravel() for _, row_scores in values])
        return Result(
            {
                "label": Strings(scores.shape, tokens),
                "score": scores,
                "text_output": Strings((len(texts), 1), texts),
            }
        )


def best(scores: Array, k: int) -> tuple[Array, Array]:
    """Return the indices and scores of the ``k`` best of each row of ``[n, size]``, best first, both ``[n, k]``."""
    if k < scores.shape[1]:
        some = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    else:
        some = np.broadcast_to(np.arange(k), (len(scores), k))
    some_scores = np.take_along_axis(scores, some, 1)
    order = np.argsort(-some_scores, axis=1, kind="stable")
    return np.take_along_axis(some, order, 1), np.take_along_axis(some_scores, order, 1)
