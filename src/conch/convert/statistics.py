"""The statistics of an agreement: rank correlations, and 95 % confidence intervals.  Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array

#: Samples are drawn with this seed, so that a conversion that is repeated finds the same intervals.
SEED: Final = 20_240_229
RESAMPLES: Final = 400
#: The normal quantile of a two-sided interval of 95 %.
Z: Final = 1.959964


def bootstrap(count: int, statistic: Callable[[Array], float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 2.5 and 97.5 percentiles of ``statistic``, a function of the indices of ``count`` samples that are drawn with
    replacement."""
    generator = np.random.default_rng(SEED)
    values = [statistic(generator.integers(0, count, count)) for _ in range(resamples)]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's interval of a share of ``count`` samples, which always holds the share itself."""
    denominator = 1 + Z**2 / count
    centre = (share + Z**2 / (2 * count)) / denominator
    half = Z * float(np.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))) / denominator
    return min(max(centre - half, 0.0), share), max(min(centre + half, 1.0), share)


def paired(gained: int, lost: int, count: int) -> tuple[float, float]:
    """The interval of the difference of two shares of the same ``count`` samples, of which ``gained`` count for the
    second share alone and ``lost`` for the first alone.

    Source: Bonett and Price, Adjusted Wald Confidence Interval for a Difference of Binomial Proportions Based on Paired
    Data, Journal of Educational and Behavioral Statistics 37 (2012).  It has a width where no sample differs.
    """
    up, down = (gained + 1) / (count + 2), (lost + 1) / (count + 2)
    half = Z * float(np.sqrt((up + down - (up - down) ** 2) / (count + 2)))
    return max(up - down - half, -1.0), min(up - down + half, 1.0)


def spearman(a: Array, b: Array) -> float:
    """The correlation of ranks; 1 when neither varies, 0 when only one does."""
    x, y = ranks(a), ranks(b)
    return _correlation(x - x.mean(), y - y.mean())


def kendall(a: Array, b: Array) -> float:
    """Kendall's tau-b; 1 when neither varies, 0 when only one does."""
    pairs = np.triu_indices(len(a), 1)
    x, y = (np.sign(values[:, None] - values[None, :])[pairs] for values in (a, b))
    return _correlation(x, y)


def ranks(values: Array) -> Array:
    """Ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    shared: Array = (np.cumsum(counts) - (counts + 1) / 2)[inverse]
    return shared


def _correlation(x: Array, y: Array) -> float:
    """The cosine of two centred vectors."""
    lengths = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / lengths if lengths else float(not x.any() and not y.any())
