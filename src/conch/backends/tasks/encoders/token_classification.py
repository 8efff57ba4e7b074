"""The task ``token-classification``: finds the entities in a text; returns one JSON document per row.

Source: ``TokenClassificationPipeline`` of transformers; results are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array, Request, Result, Strings
from conch.backends.tasks.classification import checked_choice, mislabelled
from conch.backends.tasks.encoders.encoder_task import TEXT, EncodedRequest, EncoderTask, PaddedBatch, texts_of
from conch.backends.tasks.task import OpenEngine, TaskDescription
from conch.checkpoints.activations import softmax
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.tokenizers.tokenizer import TextTokenizer, Tokens
from conch.core.errors import unsupported
from conch.core.inference import TensorSpec

#: The input and parameter that selects one of ``STRATEGIES``.
STRATEGY: Final = "aggregation_strategy"
STRATEGIES: Final = ("none", "simple", "first", "average", "max")
#: The label of tokens outside entities.
OUTSIDE: Final = "O"


@dataclass(slots=True)
class ScoredWord:
    """A token or a word: its scores, its class, and its position in the text in characters."""

    word: str
    scores: Array
    start: int
    end: int
    index: int
    #: Whether it continues the previous word.
    continues: bool = False
    label: str = ""
    score: float = 0.0


class Grouping:
    """Joins tokens into words and words into entities, for one tokenizer and the labels of one checkpoint."""

    def __init__(self, tokenizer: TextTokenizer, labels: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._labels = labels
        self._by_prefix = bool(getattr(getattr(tokenizer.fast, "model", None), "continuing_subword_prefix", None))

    def entities(self, text: str, tokens: Tokens, scores: Array, strategy: str) -> list[dict[str, Any]]:
        """Return the entities of a text for JSON, from scores FP32 ``[length, classes]``; offsets are in characters."""
        pieces = self._pieces(text, tokens, scores)
        if strategy in ("none", "simple"):
            for piece in pieces:
                self._decide(piece, piece.scores)
        else:
            pieces = self._words(pieces, strategy)
        if strategy == "none":
            return [
                {
                    "entity": piece.label,
                    "score": piece.score,
                    "index": piece.index,
                    "word": piece.word,
                    "start": piece.start,
                    "end": piece.end,
                }
                for piece in pieces
                if piece.label != OUTSIDE
            ]
        return [entity for entity in map(self._entity, _runs(pieces)) if entity["entity_group"] != OUTSIDE]

    def _pieces(self, text: str, tokens: Tokens, scores: Array) -> list[ScoredWord]:
        pieces: list[ScoredWord] = []
        columns = zip(tokens.ids.tolist(), tokens.offsets, tokens.special, scores, strict=True)
        for index, (id, (start, end), special, row) in enumerate(columns):
            if special:
                continue
            word = self._tokenizer.token(id)
            piece = ScoredWord(word, row, start, end, index)
            if id == self._tokenizer.special.unk_id:
                piece.word = text[start:end]
            elif self._by_prefix:
                piece.continues = len(word) != end - start
            else:
                piece.continues = start > 0 and " " not in text[start - 1 : start + 1]
            pieces.append(piece)
        return pieces

    def _decide(self, piece: ScoredWord, scores: Array) -> None:
        best = int(scores.argmax())
        piece.label = self._labels[best]
        piece.score = float(scores[best])

    def _words(self, pieces: list[ScoredWord], strategy: str) -> list[ScoredWord]:
        groups: list[list[ScoredWord]] = []
        for piece in pieces:
            if groups and piece.continues:
                groups[-1].append(piece)
            else:
                groups.append([piece])
        return [self._word(group, strategy) for group in groups]

    def _word(self, group: list[ScoredWord], strategy: str) -> ScoredWord:
        word = self._tokenizer.join([piece.word for piece in group])
        scores = group[0].scores
        if strategy == "max":
            scores = max(group, key=lambda piece: float(piece.scores.max())).scores
        elif strategy == "average":
            scores = np.nanmean(np.stack([piece.scores for piece in group]), axis=0)
        whole = ScoredWord(word, scores, group[0].start, group[-1].end, group[0].index)
        self._decide(whole, scores)
        return whole

    def _entity(self, run: list[ScoredWord]) -> dict[str, Any]:
        return {
            "entity_group": run[0].label.split("-", 1)[-1],
            "score": float(np.nanmean([piece.score for piece in run])),
            "word": self._tokenizer.join([piece.word for piece in run]),
            "start": run[0].start,
            "end": run[-1].end,
        }


def _runs(pieces: list[ScoredWord]) -> list[list[ScoredWord]]:
    """Group adjacent pieces of the same class; ``B-`` begins a new entity."""
    runs = [pieces[:1]] if pieces else []
    for before, piece in pairwise(pieces):
        begins, name = _tag(piece.label)
        if begins or name != _tag(before.label)[1]:
            runs.append([])
        runs[-1].append(piece)
    return runs


def _tag(label: str) -> tuple[bool, str]:
    """Return whether a label begins an entity, and the name of the entity."""
    if label.startswith(("B-", "I-")):
        return label[0] == "B", label[2:]
    return False, label


class TokenClassification(EncoderTask):
    """Returns the entities of each row, grouped by ``aggregation_strategy``, with their offsets in characters."""

    head = "AutoModelForTokenClassification"

    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        super().__init__(checkpoint, open_engine)
        if self.encoder.tokenizer.fast is None:
            raise unsupported(f"token-classification needs a tokenizer.json, and '{checkpoint.source}' has none")
        self.labels = checkpoint.labels or []
        self.grouping = Grouping(self.encoder.tokenizer, self.labels)

    @classmethod
    def describe(cls, checkpoint: Checkpoint) -> TaskDescription:
        checked_choice(STRATEGY, checkpoint.options.text(STRATEGY, "none"), STRATEGIES)
        return TaskDescription(
            (TEXT, TensorSpec(STRATEGY, "BYTES", (1,), optional=True)),
            (TensorSpec("entities", "BYTES", (1,)),),
        )

    def prepare(self, request: Request) -> EncodedRequest:
        texts = texts_of(request, "text_input")
        strategy = checked_choice(STRATEGY, self.option(request, STRATEGY, "none"), STRATEGIES)
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
