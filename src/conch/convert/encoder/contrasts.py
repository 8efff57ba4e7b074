"""Describes an encoder's outputs in words, and the difference between two outputs for a text.

Uses only the tokenizer, which decodes ids to words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.checkpoints.manifest import Contrast, Contrasts
from conch.checkpoints.tokenizers.tokenizer import Tokens
from conch.convert.conversion import kept, shortened
from conch.convert.encoder.agreement import SampleOutputs, answer_span, labels_of
from conch.convert.sentences import TextSample

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
