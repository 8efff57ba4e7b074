"""Intervals of figures; checks whether samples suffice for a verdict, and whether the reference beats chance.

Results become part of the verdict, or are printed and reported as warnings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array

#: The seed of resampling, fixed so that repeated conversions find the same intervals.
SEED: Final = 20_240_229
RESAMPLES: Final = 400
#: The normal quantile of a two-sided 95 % interval.
Z: Final = 1.959964


def bootstrap(count: int, statistic: Callable[[Array], float]) -> tuple[float, float]:
    """Return the 2.5 and 97.5 percentiles of ``statistic``.

    ``statistic`` is a function of the indices of ``count`` samples, drawn with replacement.
    """
    generator = np.random.default_rng(SEED)
    values = [statistic(generator.integers(0, count, count)) for _ in range(RESAMPLES)]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's interval of a share of ``count`` samples, extended to contain the share itself."""
    denominator = 1 + Z**2 / count
    centre = (share + Z**2 / (2 * count)) / denominator
    half = Z * float(np.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))) / denominator
    return min(max(centre - half, 0.0), share), max(min(centre + half, 1.0), share)


def paired(gained: int, lost: int, count: int) -> tuple[float, float]:
    """Return the interval of the difference between two shares of the same ``count`` samples.

    ``gained`` samples count only for the second share, and ``lost`` only for the first. The width is positive even if
    no sample differs.

    Source: Bonett and Price, Adjusted Wald Confidence Interval for a Difference of Binomial Proportions Based on Paired
    Data, Journal of Educational and Behavioral Statistics 37 (2012).
    """
    up, down = (gained + 1) / (count + 2), (lost + 1) / (count + 2)
    half = Z * float(np.sqrt((up + down - (up - down) ** 2) / (count + 2)))
    return max(up - down - half, -1.0), min(up - down + half, 1.0)


def spearman(a: Array, b: Array) -> float:
    """Return the rank correlation; 1 if neither varies, 0 if only one does."""
    x, y = ranks(a), ranks(b)
    return _correlation(x - x.mean(), y - y.mean())


def ndcg(reference: Array, scores: Array, count: int = 10) -> float:
    """Return the normalised discounted cumulative gain of the ``count`` best of ``scores``.

    The gains of the ``count`` best by ``reference`` are ``count`` … 1 and of all others 0; of fewer candidates, the
    worst has 0. Equal scores are ordered by rising gain, so that scores which do not tell candidates apart gain nothing
    from their order.
    """
    gains = np.maximum(ranks(reference) - max(0, len(reference) - 1 - count), 0)
    best, chosen = np.sort(gains)[::-1], gains[np.lexsort((gains, -scores))]
    weights = 1 / np.log2(np.arange(2, min(count, len(gains)) + 2))
    ideal = float(best[:count] @ weights)
    return float(chosen[:count] @ weights) / ideal if ideal else 1.0


def recall(reference: Array, scores: Array, count: int = 100) -> float:
    """Return the share of the ``count`` best candidates by ``reference`` that are also among those by ``scores``.

    Candidates with equal scores are in the same order by both.
    """
    best, chosen = (set(np.argsort(-values, kind="stable")[:count].tolist()) for values in (reference, scores))
    return len(best & chosen) / len(best)


def ranks(values: Array) -> Array:
    """Return ranks from 0; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    shared: Array = (np.cumsum(counts) - (counts + 1) / 2)[inverse]
    return shared


def _correlation(x: Array, y: Array) -> float:
    """Return the cosine of two centered vectors."""
    lengths = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / lengths if lengths else float(not x.any() and not y.any())


#: The minimum number of samples for judging precisions below fp32. If 35 samples all agree, Wilson's interval begins
#: at 0.90; with fewer, twice the allowed loss of int8 cannot be ruled out.
MIN_SAMPLES: Final = 35
#: The same for language models (tokens of compared texts), because their figures are means over tokens.
MIN_TOKENS: Final = 1000


def too_few(precision: str, count: int, unit: str, minimum: int) -> tuple[str, ...]:
    """Return why ``precision`` cannot be judged on ``count`` samples (or tokens, the ``unit``); empty if it can.

    fp32 always can: it is the same arithmetic, and its figures are compared number by number.
    """
    if precision == "fp32" or count >= minimum:
        return ()
    return (f"{count} {unit} are too few to judge {precision}: at least {minimum} are needed",)


def few_samples(count: int, *, both: bool) -> list[str]:
    """Return a warning for fewer samples than ``MIN_SAMPLES``; ``both``: they are used for calibration, too."""
    if count >= MIN_SAMPLES:
        return []
    lower_bound = wilson(1, count)[0]
    calibrated = ", and variants are calibrated on the samples that they are compared on" if both else ""
    return [
        f"only {count} samples are compared{calibrated}: where all agree, the share that agrees may still be "
        f"{lower_bound:.2f} (95 % interval); variants below fp32 do not serve without {MIN_SAMPLES}, for which --data "
        f"needs {-(-MIN_SAMPLES * 3 // 2)} texts"
    ]


def few_tokens(count: int) -> list[str]:
    """Return a warning for texts of fewer than ``MIN_TOKENS`` tokens."""
    if count >= MIN_TOKENS:
        return []
    return [
        f"only {count} tokens are compared: variants below fp32 are accepted only with at least {MIN_TOKENS}; provide "
        "longer --data"
    ]


def chance(labels: Sequence[int], reference: Sequence[int], names: Sequence[str]) -> list[str]:
    """Return a warning if the reference is not better than always giving the most frequent label.

    ``labels`` are the correct ones, ``reference`` the reference's. It is better if the whole 95 % interval of its
    accuracy is above that label's share.
    """
    label, frequent = Counter(labels).most_common(1)[0]
    share = frequent / len(labels)
    accuracy = sum(a == b for a, b in zip(labels, reference, strict=True)) / len(labels)
    low, high = wilson(accuracy, len(labels))
    if low > share:
        return []
    return [
        f"the checkpoint itself is at chance level on these labels: its accuracy is {accuracy:.2f} ({low:.2f} … "
        f"{high:.2f}), and always answering '{_name(label, names)}' gives {share:.2f}; accuracy does not "
        "distinguish the variants; only their agreement with the checkpoint does"
    ]


def same_label_warning(reference: Sequence[Array], names: Sequence[str]) -> list[str]:
    """Return a warning if the reference has the same label for all samples; ``reference`` has the labels of each."""
    labels = {int(label) for labels in reference for label in labels}
    if len(labels) > 1 or len(reference) < 2:
        return []
    return [
        f"the checkpoint answers '{_name(labels.pop(), names)}' to all {len(reference)} samples, so agreement of "
        "labels is not informative; pass other texts with --data"
    ]


def _name(label: int, names: Sequence[str]) -> str:
    return names[label] if label < len(names) else str(label)
