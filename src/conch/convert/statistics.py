"""Statistics of agreement: rank correlations, and 95 % confidence intervals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array

#: The seed of resampling, fixed so that repeated conversions find the same intervals.
SEED: Final = 20_240_229
RESAMPLES: Final = 400
#: The normal quantile of a two-sided 95 % interval.
Z: Final = 1.959964


def bootstrap(count: int, statistic: Callable[[Array], float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """Return the 2.5 and 97.5 percentiles of ``statistic``.

    ``statistic`` is a function of the indices of ``count`` samples, drawn with replacement.
    """
    generator = np.random.default_rng(SEED)
    values = [statistic(generator.integers(0, count, count)) for _ in range(resamples)]
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

    ``gained`` samples count only for the second share, and ``lost`` only for the first.  The width is positive even if
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


def kendall(a: Array, b: Array) -> float:
    """Return Kendall's tau-b; 1 if neither varies, 0 if only one does."""
    pairs = np.triu_indices(len(a), 1)
    x, y = (np.sign(values[:, None] - values[None, :])[pairs] for values in (a, b))
    return _correlation(x, y)


def ranks(values: Array) -> Array:
    """Return ranks from 0; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    shared: Array = (np.cumsum(counts) - (counts + 1) / 2)[inverse]
    return shared


def _correlation(x: Array, y: Array) -> float:
    """Return the cosine of two centered vectors."""
    lengths = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / lengths if lengths else float(not x.any() and not y.any())
