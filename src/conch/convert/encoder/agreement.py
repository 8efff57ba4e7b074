"""Compares a variant's outputs with the reference's, by output and by the task's metric.

Does no I/O: takes arrays, returns figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.convert.evidence import bootstrap, ndcg, paired, spearman, wilson
from conch.convert.sentences import TextSample

#: One sample's outputs by name: ``[vectors, width]`` without padding.
SampleOutputs = Mapping[str, Array]

#: The maximum length of an answer in question-answering (tokens).
_MAX_ANSWER_TOKENS: Final = 30


@dataclass(frozen=True, slots=True)
class OutputAgreement:
    """Agreement of one output over all samples.

    Cosines are of each vector with the reference's (None for vectors of one number, where they are meaningless).
    ``max_difference`` is the largest absolute difference. ``argmax`` is the share of vectors with the same argmax
    (None for vectors of other values than logits). ``width`` is the size of the widest vector.
    """

    cosine_min: float | None
    cosine_mean: float | None
    max_difference: float
    argmax: float | None
    width: int


@dataclass(frozen=True, slots=True)
class TaskAgreement:
    """The task's metric: its value, and its difference from the reference's with a 95 % confidence interval.

    Metrics that compare the variant with the reference are 1 if both are equal, so ``delta`` is the difference from 1.
    """

    name: str
    value: float
    delta: float
    low: float
    high: float
    samples: int


def compare(reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]) -> dict[str, OutputAgreement]:
    """Return figures by output name for the same samples in the same order."""
    return {
        name: _compare([sample[name] for sample in reference], [sample[name] for sample in variant], "logits" in name)
        for name in reference[0]
    }


def _compare(expected: Sequence[Array], actual: Sequence[Array], per_token: bool) -> OutputAgreement:
    cosines, agreeing, vectors, largest = [], 0, 0, 0.0
    width = max(values.shape[-1] for values in expected)
    per_token = per_token and width > 1
    for a, b in zip(expected, actual, strict=True):
        if not np.isfinite(b).all():
            return OutputAgreement(float("nan"), float("nan"), float("inf"), 0.0 if per_token else None, width)
        a, b = a.astype(np.float64), b.astype(np.float64)
        largest = max(largest, float(np.abs(a - b).max()))
        if a.shape[-1] > 1:
            cosines.append(_cosines(a, b))
        if per_token:
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
    # Zero vectors have no direction; they agree only with zero vectors.
    values = (a * b).sum(-1) / np.where(lengths > 0, lengths, 1)
    return np.where(equal, 1.0, np.where(lengths > 0, values, 0.0))


def compare_task(
    task: str, samples: Sequence[TextSample], reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]
) -> TaskAgreement:
    """Compare the outputs in terms of ``task``, such as labels or the order of passages."""
    pairs = list(zip(reference, variant, strict=True))
    if task == "text-ranking":
        return _rankings(samples, reference, variant)
    if task == "question-answering":
        return _proportion("same answer", [answer_span(a) == answer_span(b) for a, b in pairs])
    if task == "fill-mask":
        return mean_agreement("shared top 5", [_shared_top(a["logits"], b["logits"], 5) for a, b in pairs])
    if task == "token-classification":
        return mean_agreement("same token label", [(labels_of(a) == labels_of(b)).mean() for a, b in pairs])
    return _proportion("same label", [bool((labels_of(a) == labels_of(b)).all()) for a, b in pairs])


def accuracy(
    labels: Sequence[int], reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]
) -> TaskAgreement:
    """Compare the accuracy on the user's labels, given as indices, with the reference's on the same texts."""
    before, after = (
        np.array([labels_of(sample)[0] == label for sample, label in zip(samples, labels, strict=True)])
        for samples in (reference, variant)
    )
    low, high = paired(int((after & ~before).sum()), int((before & ~after).sum()), len(labels))
    value = float(after.mean())
    return TaskAgreement("accuracy", value, value - float(before.mean()), low, high, len(labels))


def labels_of(sample: SampleOutputs) -> Array:
    """Return the label index of each vector of logits; for a single logit, 1 if it is positive."""
    logits = sample["logits"]
    labels: Array = logits.argmax(-1) if logits.shape[-1] > 1 else logits[:, 0] > 0
    return labels


def _shared_top(a: Array, b: Array, count: int) -> float:
    """Return the share of common words among the ``count`` most likely of each."""
    count = min(count, a.shape[-1])
    tops = [set(np.argpartition(logits[0], -count)[-count:].tolist()) for logits in (a, b)]
    return len(tops[0] & tops[1]) / count


def answer_span(sample: SampleOutputs) -> tuple[int, int]:
    """Return the first and last token of the best answer that is not reversed and not too long."""
    start, end = sample["start_logits"][0], sample["end_logits"][0]
    scores = start[:, None] + end[None, :]
    allowed = np.triu(np.tri(len(start), len(start), _MAX_ANSWER_TOKENS, dtype=bool))
    first, last = np.unravel_index(np.where(allowed, scores, -np.inf).argmax(), scores.shape)
    return int(first), int(last)


def _rankings(
    samples: Sequence[TextSample], reference: Sequence[SampleOutputs], variant: Sequence[SampleOutputs]
) -> TaskAgreement:
    """Return the mean nDCG@10 of each query's passages, whose gains are their ranks by the reference.

    If no query has two passages, returns the rank correlation over all pairs, and with several classes, which have no
    order, the share of pairs with the same label.
    """
    if reference[0]["logits"].shape[-1] > 1:
        same = [bool((labels_of(a) == labels_of(b)).all()) for a, b in zip(reference, variant, strict=True)]
        return _proportion("same label", same)
    expected, actual = (
        np.array([sample["logits"][0, 0] for sample in outputs], np.float64) for outputs in (reference, variant)
    )
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    gains = [ndcg(expected[group], actual[group]) for group in groups.values() if len(group) > 1]
    if gains:
        return mean_agreement("nDCG@10", gains)
    interval = bootstrap(len(samples), lambda chosen: spearman(expected[chosen], actual[chosen]))
    return _against_one("order of scores", spearman(expected, actual), interval, len(samples))


def mean_agreement(name: str, values: Sequence[float]) -> TaskAgreement:
    """Return a mean of values up to 1 with a bootstrap interval; with a share's interval if all values are 1."""
    array = np.asarray(values, np.float64)
    mean = float(array.mean())
    interval = wilson(1.0, len(array)) if mean == 1 else bootstrap(len(array), lambda drawn: float(array[drawn].mean()))
    return _against_one(name, mean, interval, len(array))


def _proportion(name: str, agreeing: Sequence[bool]) -> TaskAgreement:
    """Return a share with Wilson's interval, because resampling samples that all agree would give a zero width."""
    count, share = len(agreeing), sum(agreeing) / len(agreeing)
    return _against_one(name, share, wilson(share, count), count)


def _against_one(name: str, value: float, interval: tuple[float, float], count: int) -> TaskAgreement:
    """Return a metric that is 1 for the reference."""
    return TaskAgreement(name, value, value - 1, interval[0] - 1, interval[1] - 1, count)
