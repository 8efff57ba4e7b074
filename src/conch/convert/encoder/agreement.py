"""How far a variant's answers are from those of the reference: per output, and in the task's own terms.

Pure: arrays in, figures out.  Used by ``conch convert``.  An :data:`Observation` is what one network said about one
sample: by output, an array ``[vectors, width]`` of what is real in it (no padding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.convert.sentences import TextSample

Array = npt.NDArray[Any]
Observation = Mapping[str, Array]

SEED: Final = 20_240_229
RESAMPLES: Final = 400
#: The normal quantile of a two-sided interval of 95 %.
_Z: Final = 1.959964
#: The longest answer that question-answering considers, in tokens.
_LONGEST_ANSWER: Final = 30


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
    """The task's metric: its value, and its difference from the reference's with a 95 % interval of that.

    Metrics that compare the variant with the reference itself are 1 when both say the same, so ``delta`` is
    what is missing from 1.
    """

    name: str
    value: float
    delta: float
    low: float
    high: float
    samples: int


def compare(reference: Sequence[Observation], variant: Sequence[Observation]) -> dict[str, OutputAgreement]:
    """Figures by output name, over the same samples in the same order."""
    return {
        name: _compare([one[name] for one in reference], [one[name] for one in variant], _has_places(name))
        for name in reference[0]
    }


def _has_places(name: str) -> bool:
    return "logits" in name


def _compare(expected: Sequence[Array], actual: Sequence[Array], places: bool) -> OutputAgreement:
    cosines, agreeing, vectors, largest = [], 0, 0, 0.0
    width = max(one.shape[-1] for one in expected)
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
    task: str, samples: Sequence[TextSample], reference: Sequence[Observation], variant: Sequence[Observation]
) -> TaskAgreement:
    """The metric of ``task``: see the functions below for which, and why."""
    if task in ("feature-extraction", "sentence-similarity"):
        return _similarities(reference, variant)
    if task == "text-ranking":
        return _rankings(samples, reference, variant)
    if task == "question-answering":
        return _proportion("same answer", [_span(a) == _span(b) for a, b in zip(reference, variant, strict=True)])
    if task == "fill-mask":
        return _mean(
            "shared top 5", [_shared(a["logits"], b["logits"], 5) for a, b in zip(reference, variant, strict=True)]
        )
    if task == "token-classification":
        same = [(_labels(a) == _labels(b)).mean() for a, b in zip(reference, variant, strict=True)]
        return _mean("same token label", same)
    return _classification(samples, reference, variant)


def _classification(
    samples: Sequence[TextSample], reference: Sequence[Observation], variant: Sequence[Observation]
) -> TaskAgreement:
    return _proportion(
        "same label", [bool((_labels(a) == _labels(b)).all()) for a, b in zip(reference, variant, strict=True)]
    )


def accuracy(labels: Sequence[int], reference: Sequence[Observation], variant: Sequence[Observation]) -> TaskAgreement:
    """Accuracy on labels that the user gave, as indices, against the reference's on the same texts."""
    before = np.array([_labels(one)[0] == label for one, label in zip(reference, labels, strict=True)], float)
    after = np.array([_labels(one)[0] == label for one, label in zip(variant, labels, strict=True)], float)
    low, high = _bootstrap(len(labels), lambda chosen: float((after - before)[chosen].mean()))
    value = float(after.mean())
    return TaskAgreement("accuracy", value, value - float(before.mean()), low, high, len(labels))


def _labels(one: Observation) -> Array:
    places: Array = one["logits"].argmax(-1) if one["logits"].shape[-1] > 1 else one["logits"][:, 0] > 0
    return places


def _shared(a: Array, b: Array, count: int) -> float:
    count = min(count, a.shape[-1])
    tops = [set(np.argpartition(one[0], -count)[-count:].tolist()) for one in (a, b)]
    return len(tops[0] & tops[1]) / count


def _span(one: Observation) -> tuple[int, int]:
    """The best answer: start not after end, and not too long."""
    start, end = one["start_logits"][0], one["end_logits"][0]
    scores = start[:, None] + end[None, :]
    allowed = np.triu(np.tri(len(start), len(start), _LONGEST_ANSWER, dtype=bool))
    first, last = np.unravel_index(np.where(allowed, scores, -np.inf).argmax(), scores.shape)
    return int(first), int(last)


def _similarities(reference: Sequence[Observation], variant: Sequence[Observation]) -> TaskAgreement:
    """Do the same texts come out as similar?  The rank correlation of all pairwise similarities."""
    expected, actual = (_similarity_matrix(one) for one in (reference, variant))

    def correlation(chosen: Array) -> float:
        # A text drawn twice is not a pair of texts.
        upper = np.triu(chosen[:, None] != chosen[None, :], 1)
        rows, columns = np.nonzero(upper)
        rows, columns = chosen[rows], chosen[columns]
        return spearman(expected[rows, columns], actual[rows, columns])

    count = len(reference)
    value = correlation(np.arange(count))
    low, high = _bootstrap(count, correlation, resamples=RESAMPLES // 4)
    return TaskAgreement("order of similarities", value, value - 1, low - 1, high - 1, count)


def _similarity_matrix(observations: Sequence[Observation]) -> Array:
    vectors = np.stack([one["embedding"][0] for one in observations]).astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    matrix: Array = vectors @ vectors.T
    return matrix


def _rankings(
    samples: Sequence[TextSample], reference: Sequence[Observation], variant: Sequence[Observation]
) -> TaskAgreement:
    """Are a query's passages put into the same order?  The mean over the queries of Kendall's tau; without two
    passages for any query, the rank correlation over all pairs."""
    expected = np.array([one["logits"][0, -1] for one in reference], np.float64)
    actual = np.array([one["logits"][0, -1] for one in variant], np.float64)
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    taus = [kendall(expected[group], actual[group]) for group in groups.values() if len(group) > 1]
    if taus:
        return _mean("order of passages", taus)
    value = spearman(expected, actual)
    low, high = _bootstrap(len(samples), lambda chosen: spearman(expected[chosen], actual[chosen]))
    return TaskAgreement("order of scores", value, value - 1, low - 1, high - 1, len(samples))


def _mean(name: str, values: Sequence[float]) -> TaskAgreement:
    array = np.asarray(values, np.float64)
    value = float(array.mean())
    low, high = _bootstrap(len(array), lambda chosen: float(array[chosen].mean()))
    return TaskAgreement(name, value, value - 1, low - 1, high - 1, len(array))


def _proportion(name: str, agreeing: Sequence[bool]) -> TaskAgreement:
    """A share with Wilson's interval: drawing again from samples that all agree would claim certainty."""
    count, share = len(agreeing), sum(agreeing) / len(agreeing)
    denominator = 1 + _Z**2 / count
    centre = (share + _Z**2 / (2 * count)) / denominator
    half = _Z * float(np.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))) / denominator
    low, high = min(max(centre - half, 0.0), share), max(min(centre + half, 1.0), share)
    return TaskAgreement(name, share, share - 1, low - 1, high - 1, count)


def _bootstrap(count: int, statistic: Callable[[Array], float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 2.5 and 97.5 percentiles of a statistic of samples drawn with replacement, always the same ones."""
    generator = np.random.default_rng(SEED)
    values = [statistic(generator.integers(0, count, count)) for _ in range(resamples)]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def spearman(a: Array, b: Array) -> float:
    """The correlation of ranks; 1 when neither varies, 0 when only one does."""
    return _pearson(ranks(a), ranks(b))


def ranks(values: Array) -> Array:
    """Ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    after = np.cumsum(counts)
    shared: Array = (after - (counts + 1) / 2)[inverse]
    return shared


def kendall(a: Array, b: Array) -> float:
    """Kendall's tau-b; 1 when neither varies, 0 when only one does."""
    upper = np.triu_indices(len(a), 1)
    x, y = (np.sign(one[:, None] - one[None, :])[upper] for one in (a, b))
    lengths = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / lengths if lengths else float(not x.any() and not y.any())


def _pearson(a: Array, b: Array) -> float:
    x, y = a - a.mean(), b - b.mean()
    lengths = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / lengths if lengths else float(not x.any() and not y.any())
