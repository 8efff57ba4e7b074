"""How far a variant's outputs are from those of the reference: per output, and in the task's own terms.

Pure: arrays in, figures out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.convert.sentences import TextSample
from conch.convert.statistics import RESAMPLES, bootstrap, kendall, paired, spearman, wilson

#: What a network says about one sample: by output, ``[vectors, width]`` without padding.
SampleOutputs = Mapping[str, Array]

#: Longer answers are not considered in question-answering.
_MAX_ANSWER_TOKENS: Final = 30


@dataclass(frozen=True, slots=True)
class OutputAgreement:
    """One output over all samples.

    The cosine of every vector with the reference's (None for vectors of one number, whose cosine says nothing), the
    largest absolute difference of any number, and in which share of vectors the largest number is at the same place
    (None where a place has no meaning).  ``width`` is that of the widest vector.
    """

    cosine_min: float | None
    cosine_mean: float | None
    max_difference: float
    argmax: float | None
    width: int


@dataclass(frozen=True, slots=True)
class TaskAgreement:
    """The task's metric: its value, and its difference from the reference's with the 95 % interval of that.

    Metrics that compare the variant with the reference itself are 1 when both say the same, so ``delta`` is
    what is missing from 1.
    """

    name: str
    value: float
    delta: float
    low: float
    high: float
    samples: int


def compare(reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]) -> dict[str, OutputAgreement]:
    """Figures by output name, over the same samples in the same order."""
    return {
        name: _compare([sample[name] for sample in reference], [sample[name] for sample in variant], "logits" in name)
        for name in reference[0]
    }


def _compare(expected: Sequence[Array], actual: Sequence[Array], places: bool) -> OutputAgreement:
    cosines, agreeing, vectors, largest = [], 0, 0, 0.0
    width = max(values.shape[-1] for values in expected)
    places = places and width > 1
    for a, b in zip(expected, actual, strict=True):
        if not np.isfinite(b).all():
            return OutputAgreement(float("nan"), float("nan"), float("inf"), 0.0 if places else None, width)
        a, b = a.astype(np.float64), b.astype(np.float64)
        largest = max(largest, float(np.abs(a - b).max()))
        if a.shape[-1] > 1:
            cosines.append(_cosines(a, b))
        if places:
            agreeing += int((a.argmax(-1) == b.argmax(-1)).sum())
            vectors += len(a)
    joined = np.concatenate(cosines) if cosines else None
    return OutputAgreement(
        None if joined is None else float(joined.min()),
        None if joined is None else float(joined.mean()),
        largest,
        agreeing / vectors if vectors else None,
        width,
    )


def _cosines(a: Array, b: Array) -> Array:
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    equal = (a == b).all(-1)
    # Vectors of zeros have no direction; they agree when both are zeros.
    values = (a * b).sum(-1) / np.where(lengths > 0, lengths, 1)
    return np.where(equal, 1.0, np.where(lengths > 0, values, 0.0))


def compare_task(
    task: str, samples: Sequence[TextSample], reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]
) -> TaskAgreement:
    """Compare what the outputs mean for ``task``, such as labels or the order of passages."""
    pairs = list(zip(reference, variant, strict=True))
    if task in ("feature-extraction", "sentence-similarity"):
        return _similarities(reference, variant)
    if task == "text-ranking":
        return _rankings(samples, reference, variant)
    if task == "question-answering":
        return _proportion("same answer", [answer_span(a) == answer_span(b) for a, b in pairs])
    if task == "fill-mask":
        return _mean("shared top 5", [_shared_top(a["logits"], b["logits"], 5) for a, b in pairs])
    if task == "token-classification":
        return _mean("same token label", [(labels_of(a) == labels_of(b)).mean() for a, b in pairs])
    return _proportion("same label", [bool((labels_of(a) == labels_of(b)).all()) for a, b in pairs])


def accuracy(
    labels: Sequence[int], reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]
) -> TaskAgreement:
    """Accuracy on labels that the user gave, as indices, against the reference's on the same texts."""
    before, after = (
        np.array([labels_of(sample)[0] == label for sample, label in zip(samples, labels, strict=True)])
        for samples in (reference, variant)
    )
    low, high = paired(int((after & ~before).sum()), int((before & ~after).sum()), len(labels))
    value = float(after.mean())
    return TaskAgreement("accuracy", value, value - float(before.mean()), low, high, len(labels))


def labels_of(sample: SampleOutputs) -> Array:
    """The index of the label of each vector of logits; with a single logit 1 where it is positive."""
    logits = sample["logits"]
    labels: Array = logits.argmax(-1) if logits.shape[-1] > 1 else logits[:, 0] > 0
    return labels


def _shared_top(a: Array, b: Array, count: int) -> float:
    """The share of the ``count`` likeliest words that both have."""
    count = min(count, a.shape[-1])
    tops = [set(np.argpartition(logits[0], -count)[-count:].tolist()) for logits in (a, b)]
    return len(tops[0] & tops[1]) / count


def answer_span(sample: SampleOutputs) -> tuple[int, int]:
    """First and last token of the best answer: the first not after the last, and not too long."""
    start, end = sample["start_logits"][0], sample["end_logits"][0]
    scores = start[:, None] + end[None, :]
    allowed = np.triu(np.tri(len(start), len(start), _MAX_ANSWER_TOKENS, dtype=bool))
    first, last = np.unravel_index(np.where(allowed, scores, -np.inf).argmax(), scores.shape)
    return int(first), int(last)


def _similarities(reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]) -> TaskAgreement:
    """Do the same texts come out as similar?  The rank correlation of all pairwise similarities."""
    expected, actual = _similarity_matrix(reference), _similarity_matrix(variant)

    def correlation(chosen: Array) -> float:
        # A text drawn twice is not a pair of texts.
        rows, columns = np.nonzero(np.triu(chosen[:, None] != chosen[None, :], 1))
        rows, columns = chosen[rows], chosen[columns]
        if not len(rows):
            return 0.0  # Of very few texts a draw may have one alone, which has no order.
        return spearman(expected[rows, columns], actual[rows, columns])

    count = len(reference)
    interval = bootstrap(count, correlation, resamples=RESAMPLES // 4)
    return _against_one("order of similarities", correlation(np.arange(count)), interval, count)


def _similarity_matrix(samples: Sequence[SampleOutputs]) -> Array:
    vectors = np.stack([sample["embedding"][0] for sample in samples]).astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    matrix: Array = vectors @ vectors.T
    return matrix


def _rankings(
    samples: Sequence[TextSample], reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]
) -> TaskAgreement:
    """Are a query's passages put into the same order?  The mean over the queries of Kendall's tau; without two
    passages for any query, the rank correlation over all pairs."""
    expected, actual = (
        np.array([sample["logits"][0, -1] for sample in outputs], np.float64) for outputs in (reference, variant)
    )
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    taus = [kendall(expected[group], actual[group]) for group in groups.values() if len(group) > 1]
    if taus:
        return _mean("order of passages", taus)
    interval = bootstrap(len(samples), lambda chosen: spearman(expected[chosen], actual[chosen]))
    return _against_one("order of scores", spearman(expected, actual), interval, len(samples))


def _mean(name: str, values: Sequence[float]) -> TaskAgreement:
    """A mean of values up to 1 with a bootstrap's interval, or that of a share where none differs from 1."""
    array = np.asarray(values, np.float64)
    mean = float(array.mean())
    interval = wilson(1.0, len(array)) if mean == 1 else bootstrap(len(array), lambda drawn: float(array[drawn].mean()))
    return _against_one(name, mean, interval, len(array))


def _proportion(name: str, agreeing: Sequence[bool]) -> TaskAgreement:
    """A share with Wilson's interval: drawing again from samples that all agree would claim certainty."""
    count, share = len(agreeing), sum(agreeing) / len(agreeing)
    return _against_one(name, share, wilson(share, count), count)


def _against_one(name: str, value: float, interval: tuple[float, float], count: int) -> TaskAgreement:
    """A metric that is 1 for the reference."""
    return TaskAgreement(name, value, value - 1, interval[0] - 1, interval[1] - 1, count)
