"""The task ``text-ranking``: scores of a query and a document, as in sentence-transformers' CrossEncoder.

The network is a classifier of pairs or a causal language model. The pairs of a request to a language model often begin
with the same tokens: the instructions and the query. These tokens are computed once for all pairs with the same query.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array, Request, Result
from conch.backends.tasks.causal import CAUSAL_HEAD, CausalEngine, Prefix
from conch.backends.tasks.classification import FUNCTION, FUNCTIONS, apply, checked_choice
from conch.backends.tasks.encoders.encoder_task import (
    PAIR,
    TEXT,
    EncodedRequest,
    EncoderTask,
    PaddedBatch,
    stacked,
    texts_of,
)
from conch.backends.tasks.task import ExecutionWork, OpenEngine, TaskDescription
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.ranking import PairEncoder, RankingPlan, is_causal
from conch.checkpoints.tokenizers.tokenizer import Tokens
from conch.core.errors import unsupported
from conch.core.inference import TensorSpec
from conch.core.lengths import OVERHEAD

#: Maximum number of pairs in a request. Other requests do not wait for all of them.
_MAX_PAIRS: Final = 1024


class Continuation(Tokens):
    """The tokens of a pair after a ``prefix`` that it shares with other pairs."""

    __slots__ = ("prefix",)

    def __init__(self, whole: Tokens, prefix: Prefix) -> None:
        super().__init__(whole.ids[len(prefix.ids) :], None, whole.length)
        self.prefix = prefix

    @property
    def count(self) -> int:
        return len(self.prefix.ids) + len(self.ids)


class Rerank(EncoderTask):
    """Scores the relevance of ``text_pair`` (a document) to ``text_input`` (a query) in each row.

    The activation is that of the checkpoint, by default sigmoid for one class and none for several.
    """

    head = "AutoModelForSequenceClassification"
    pair = True

    def __init__(self, checkpoint: Checkpoint, open_engine: OpenEngine) -> None:
        super().__init__(checkpoint, open_engine)
        self.plan = RankingPlan.read(checkpoint)
        if self.plan.max_length:
            self.encoder.max_length = min(self.encoder.max_length, self.plan.max_length)
        self.pairs = PairEncoder(self.plan, checkpoint, self.encoder)
        for engine in self.engine.parts:
            if isinstance(engine, CausalEngine):
                engine.keep(self.plan.true_id, self.plan.false_id)
        self.shares_prefixes = False
        if isinstance(self.engine, CausalEngine):
            self.shares_prefixes = self.engine.continues_prefixes(range(3, 19), 5)
        elif self.plan.causal:
            self._require_scores()

    def _require_scores(self) -> None:
        """Raise UNSUPPORTED unless the graph of a causal language model returns the logits of a score."""
        expected = 1 if self.plan.false_id is None else 2
        ids = np.arange(3, 9)[None]
        for engine in self.engine.parts:
            logits = engine.run({"input_ids": ids, "attention_mask": np.ones_like(ids)})["logits"]
            if logits.shape != (1, expected):
                raise unsupported(
                    f"engine '{engine.name}' does not rank with this causal language model: its graph gives the logits "
                    "of all tokens; choose torch, or convert the checkpoint with conch convert"
                )

    @classmethod
    def choose_head(cls, checkpoint: Checkpoint) -> str:
        return CAUSAL_HEAD if is_causal(checkpoint.config) else cls.head

    @classmethod
    def describe(cls, checkpoint: Checkpoint) -> TaskDescription:
        if FUNCTION in checkpoint.options.extra:
            checked_choice(FUNCTION, checkpoint.options.extra[FUNCTION], FUNCTIONS)
        plan = RankingPlan.read(checkpoint)
        inputs = [TEXT, PAIR, TensorSpec(FUNCTION, "BYTES", (1,), optional=True)]
        if plan.prompts.by_name:
            plan.prompts.text(checkpoint.options.extra.get("prompt_name"), None)
            inputs.append(TensorSpec("prompt_name", "BYTES", (1,), optional=True))
        classes = 1 if plan.causal else len(checkpoint.labels or ()) or 1
        outputs = TensorSpec("score", "FP32", (classes,)), TensorSpec("logits", "FP32", (classes,))
        return TaskDescription(tuple(inputs), outputs, _MAX_PAIRS)

    def prepare(self, request: Request) -> EncodedRequest:
        queries = texts_of(request, TEXT.name)
        documents = texts_of(request, PAIR.name)
        function = self.function(request)
        sequences, truncated = self.pairs.encode(queries, documents, self.prompt_of(request), request.parameters)
        if self.shares_prefixes:
            sequences = shared_prefixes(queries, sequences, self.budget)
        return EncodedRequest(request, sequences, truncated, function)

    def prompt_of(self, request: Request) -> str:
        prompts = self.plan.prompts
        return prompts.text(self.option(request, "prompt_name"), None) if prompts.by_name else ""

    def divide(self, sequences: Sequence[Tokens]) -> list[list[int]]:
        """Return the indices of the sequences of each run; those of a run have the same prefix."""
        groups: dict[Prefix | None, list[int]] = {}
        for index, sequence in enumerate(sequences):
            groups.setdefault(sequence.prefix if isinstance(sequence, Continuation) else None, []).append(index)
        return [
            [group[index] for index in run]
            for group in groups.values()
            for run in super(Rerank, self).divide([sequences[index] for index in group])
        ]

    def compute(self, arrays: dict[str, Array], batch: PaddedBatch, work: ExecutionWork) -> dict[str, Array]:
        first = batch.sequences[0]
        if not isinstance(first, Continuation) or not isinstance(self.engine, CausalEngine):
            return super().compute(arrays, batch, work)
        prefix = first.prefix
        if prefix.cache is None:
            self.engine.read(prefix)
            work.add(len(prefix.ids), len(prefix.ids), 0)
        return self.engine.run(arrays, prefix=prefix)

    def extract(self, outputs: Mapping[str, Array], batch: PaddedBatch) -> Iterable[Any]:
        logits = outputs["logits"]
        if self.plan.causal and self.plan.false_id is not None:
            return logits[:, :1] - logits[:, 1:]
        return logits

    def assemble(self, encoded: EncodedRequest, values: list[Any]) -> Result:
        logits = stacked(values)
        function = encoded.state
        outputs: dict[str, Any] = {"score": apply(function, logits) if function else self.plan.activation(logits)}
        if "logits" in encoded.request.outputs:
            outputs["logits"] = logits
        return Result(outputs)


def shared_prefixes(queries: Sequence[str], sequences: Sequence[Tokens], maximum: int) -> list[Tokens]:
    """Divide the sequences of equal queries into their common beginning, of at most ``maximum`` tokens, and the rest.

    A beginning that saves fewer tokens than a run costs stays part of its sequences.
    """
    divided = list(sequences)
    groups: dict[str, list[int]] = {}
    for index, query in enumerate(queries):
        groups.setdefault(query, []).append(index)
    for group in groups.values():
        length = min(common_length([sequences[index].ids for index in group]), maximum)
        if length * (len(group) - 1) > OVERHEAD:
            prefix = Prefix(sequences[group[0]].ids[:length])
            for index in group:
                divided[index] = Continuation(sequences[index], prefix)
    return divided


def common_length(sequences: Sequence[Array]) -> int:
    """Return the number of tokens with which all sequences begin; at least one token of each remains."""
    first, length = sequences[0], min(map(len, sequences)) - 1
    for other in sequences[1:]:
        different = np.flatnonzero(first[:length] != other[:length])
        length = int(different[0]) if len(different) else length
    return length
