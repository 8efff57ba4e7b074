"""Describes an encoder's outputs in words, and the differences between two outputs.

For a text, uses only the tokenizer, which decodes ids to words. For an embedding model, ``compare_order`` compares the
order in which it ranks passages for queries with the reference's order. Takes arrays, returns figures; no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.checkpoints.manifest import Contrast, Contrasts
from conch.checkpoints.tokenizers.tokenizer import Tokens
from conch.convert.conversion import kept, shortened
from conch.convert.encoder.agreement import SampleOutputs, TaskAgreement, answer_span, labels_of, mean_agreement
from conch.convert.evidence import ndcg, recall
from conch.convert.sentences import SearchTexts, TextSample

#: The maximum number of words and tokens in a description.
_MOST: Final = 4
_DECIMALS: Final = 3

#: Describes a sample's outputs, given its index.
Words = Callable[[int], str]
#: Decodes token ids to text.
Decode = Callable[[Sequence[int]], str]


class EncoderAnswers:
    """Describes the outputs of a task; ``names`` are its labels, ``tokens`` those of each sample."""

    def __init__(
        self, task: str, samples: Sequence[TextSample], tokens: Sequence[Tokens], names: Sequence[str], decode: Decode
    ) -> None:
        self._task = task
        self._samples = samples
        self._tokens = tokens
        self._names = names
        self._decode = decode

    def contrasts(self, reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]) -> Contrasts:
        """Return the differences between a variant's outputs and the reference's for the same samples."""
        pairs = list(zip(reference, variant, strict=True))
        differences = [self._difference(a, b) for a, b in pairs]
        before, after = self._words(reference, variant), self._words(variant, reference)

        def describe(index: int) -> Contrast:
            sample, (a, b) = self._samples[index], pairs[index]
            text = sample.text if sample.pair is None else f"{sample.text} | {sample.pair}"
            cosine = smallest_cosine(a, b)
            rounded = None if cosine is None else round(cosine, 6)
            return Contrast(shortened(text), before(index), after(index), float(f"{differences[index]:.4g}"), rounded)

        return kept(self._measure, np.array(differences), differences, describe)

    @property
    def _measure(self) -> str:
        return f"difference of a {'score' if self._task == 'text-ranking' else 'probability'}"

    def _difference(self, a: SampleOutputs, b: SampleOutputs) -> float:
        """Return the difference of two outputs, infinite if one is not finite."""
        if not all(np.isfinite(sample[name]).all() for sample in (a, b) for name in a):
            return float("inf")
        turn = (lambda values: values) if self._task == "text-ranking" else probabilities
        return max(float(np.abs(turn(a[name]) - turn(b[name])).max()) for name in a)

    def _words(self, outputs: Sequence[SampleOutputs], others: Sequence[SampleOutputs]) -> Words:
        """Return a function that describes ``outputs`` by sample index.

        Label sequences show only differences from ``others``.
        """
        match self._task:
            case "text-ranking":
                return lambda index: (
                    "score " + ", ".join(f"{value:.{_DECIMALS}f}" for value in outputs[index]["logits"][0].tolist())
                )
            case "question-answering":
                return lambda index: self._span(index, outputs[index])
            case "fill-mask":
                return lambda index: self._likeliest(outputs[index])
            case "token-classification":
                return lambda index: self._token_labels(index, outputs[index], others[index])
        return lambda index: self._label(outputs[index])

    def _span(self, index: int, outputs: SampleOutputs) -> str:
        first, last = answer_span(outputs)
        return shortened(self._decode(self._tokens[index].ids[first : last + 1].tolist())) or "no answer"

    def _likeliest(self, outputs: SampleOutputs) -> str:
        shares = probabilities(outputs["logits"])[0]
        best = np.argsort(-shares)[:_MOST]
        return ", ".join(f"{self._decode([int(id)]).strip()} {shares[id]:.2f}" for id in best)

    def _token_labels(self, index: int, outputs: SampleOutputs, others: SampleOutputs) -> str:
        labels, other = labels_of(outputs), labels_of(others)
        positions = np.flatnonzero(labels != other)
        ids = self._tokens[index].ids
        shown = [
            f"{self._decode([int(ids[position])]).strip()}: {self._name(labels[position])}"
            for position in positions[:_MOST]
        ]
        more = f" and {len(positions) - _MOST} more" if len(positions) > _MOST else ""
        return ", ".join(shown) + more if shown else "the same labels"

    def _label(self, outputs: SampleOutputs) -> str:
        shares, label = probabilities(outputs["logits"])[0], int(labels_of(outputs)[0])
        share = shares[label] if len(shares) > 1 else shares[0]
        return f"{self._name(label)} {share:.{_DECIMALS}f}"

    def _name(self, label: int) -> str:
        return self._names[label] if label < len(self._names) else f"LABEL_{label}"


def probabilities(logits: Array) -> Array:
    """Apply softmax over the last axis, or the logistic function to a single number."""
    values = logits.astype(np.float64)
    if values.shape[-1] == 1:
        shares: Array = 1 / (1 + np.exp(-values))
        return shares
    powers = np.exp(values - values.max(-1, keepdims=True))
    shares = powers / powers.sum(-1, keepdims=True)
    return shares


def smallest_cosine(a: SampleOutputs, b: SampleOutputs) -> float | None:
    """Return the smallest cosine of two outputs' vectors; None without vectors of more than one number."""
    smallest = []
    for name in a:
        if a[name].shape[-1] == 1 or a[name].shape != b[name].shape:
            continue
        x, y = a[name].astype(np.float64), b[name].astype(np.float64)
        lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
        cosines = (x * y).sum(-1) / np.where(lengths > 0, lengths, 1)
        if np.isfinite(cosines).all():
            smallest.append(float(cosines.min()))
    return min(smallest, default=None)


#: The names of a text's outputs: one vector, one sparse vector with an element for each word, a vector per token.
DENSE_VECTOR, SPARSE_VECTOR, TOKEN_VECTORS = "embedding", "sparse_embedding", "token_embeddings"
#: The numbers of the best passages that are compared; at most three of five passages.
FIRST, MOST = 10, 100


def compare_order(
    texts: SearchTexts, similarity: str, reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]
) -> tuple[TaskAgreement, TaskAgreement]:
    """Return nDCG@10, whose gains are the reference's ranks, and recall@100 of the reference's best passages.

    For a model with several kinds of vectors, they are those of the kind with the lowest nDCG@10.
    """
    pairs = [_compare_order(name, texts, similarity, reference, variant) for name in reference[0]]
    return min(pairs, key=lambda pair: pair[0].value)


def _compare_order(
    name: str,
    texts: SearchTexts,
    similarity: str,
    reference: Sequence[SampleOutputs],
    variant: Sequence[SampleOutputs],
) -> tuple[TaskAgreement, TaskAgreement]:
    expected, actual = (scores(name, texts, similarity, outputs) for outputs in (reference, variant))
    rows = list(zip(expected, actual, strict=True))
    most = min(MOST, max(1, len(texts.passages) * 3 // 5))
    of = f" of {name}" if len(reference[0]) > 1 else ""
    return (
        mean_agreement(f"nDCG@{FIRST}{of}", [ndcg(a, b, FIRST) for a, b in rows]),
        mean_agreement(f"recall@{most}{of}", [recall(a, b, most) for a, b in rows]),
    )


def scores(name: str, texts: SearchTexts, similarity: str, outputs: Sequence[SampleOutputs]) -> Array:
    """Return ``[queries, passages]``; a passage that is the query itself has the lowest score."""
    count = len(texts.queries)
    queries, passages = ([output[name] for output in part] for part in (outputs[:count], outputs[count:]))
    if name == TOKEN_VECTORS:
        matrix = _late_interaction(queries, passages)
    else:
        function = similarity if name == DENSE_VECTOR or similarity == "cosine" else "dot"
        matrix = _similarities(function, np.concatenate(queries), np.concatenate(passages))
    same = np.array([[query == passage for passage in texts.passages] for query in texts.queries])
    return np.where(same, -np.inf, np.nan_to_num(matrix, nan=-np.inf))


def _similarities(function: str, queries: Array, passages: Array) -> Array:
    queries, passages = (vectors.astype(np.float64) for vectors in (queries, passages))
    if function == "euclidean":
        return np.stack([-np.linalg.norm(passages - query, axis=1) for query in queries])
    if function == "manhattan":
        return np.stack([-np.abs(passages - query).sum(1) for query in queries])
    if function != "dot":
        queries, passages = (
            vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            for vectors in (queries, passages)
        )
    return np.asarray(queries @ passages.T)


def _late_interaction(queries: Sequence[Array], passages: Sequence[Array]) -> Array:
    """Return the sum over a query's vectors of the largest product with a vector of the passage."""
    filled = [vectors if len(vectors) else np.zeros((1, vectors.shape[1]), np.float32) for vectors in passages]
    starts = np.cumsum([0, *map(len, filled[:-1])])
    joined = np.concatenate(filled).T
    return np.stack([np.maximum.reduceat(query @ joined, starts, axis=1).sum(0) for query in queries])


#: The number of characters of a passage in a description.
_PASSAGE: Final = 80


def contrasts(
    texts: SearchTexts, similarity: str, reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]
) -> Contrasts:
    """Return the texts whose vectors differ most: queries with their best passage, and the reverse."""
    cosines = [smallest_cosine(a, b) for a, b in zip(reference, variant, strict=True)]
    differences = [
        0.0 if cosine is None and _finite(output) else float("inf") if cosine is None else max(0.0, 1 - cosine)
        for cosine, output in zip(cosines, variant, strict=True)
    ]
    name = next(iter(reference[0]))
    before, after = (scores(name, texts, similarity, outputs) for outputs in (reference, variant))
    everything = [*texts.queries, *texts.passages]

    def best(matrix: Array, index: int) -> str:
        count = len(texts.queries)
        row, others = (matrix[index], texts.passages) if index < count else (matrix[:, index - count], texts.queries)
        nearest = int(row.argmax())
        return f"nearest ({row[nearest]:.3f}): {shortened(others[nearest], _PASSAGE)}"

    def describe(index: int) -> Contrast:
        cosine = cosines[index]
        return Contrast(
            shortened(everything[index]),
            best(before, index),
            best(after, index),
            float(f"{differences[index]:.4g}"),
            None if cosine is None else round(cosine, 6),
        )

    return kept("1 − cosine of the two embeddings", np.array(differences), differences, describe)


def _finite(output: SampleOutputs) -> bool:
    return all(np.isfinite(values).all() for values in output.values())
