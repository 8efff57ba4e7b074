"""Correlations of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from conch.convert.evidence import ndcg, paired, ranks, spearman


def test_rank_statistics() -> None:
    a = np.array([1.0, 2.0, 2.0, 4.0])

    assert ranks(a).tolist() == [0, 1.5, 1.5, 3]
    assert spearman(a, a**3) == pytest.approx(1)
    assert spearman(a, -a) == pytest.approx(-1)
    assert spearman(np.ones(3), np.ones(3)) == 1
    assert spearman(np.ones(3), np.arange(3)) == 0


def test_ndcg_discounts_the_gains_of_the_best_candidates() -> None:
    second = 1 / np.log2(3)
    assert ndcg(np.array([5, 7, 9]), np.array([1, 2, 3])) == 1
    assert ndcg(np.array([5, 7, 9]), np.array([1, 3, 2])) == pytest.approx((1 + 2 * second) / (2 + second))
    # Only the best candidates count, and scores that are all equal are no order.
    assert ndcg(np.array([5, 7, 9]), np.array([2, 1, 3]), 1) == 1
    assert ndcg(np.array([5, 7, 9]), np.ones(3)) == pytest.approx((second + 1) / (2 + second))
    assert ndcg(np.ones(3), np.arange(3)) == 1


def test_difference_of_paired_shares_has_an_interval_where_nothing_differs() -> None:
    low, high = paired(0, 0, 3)
    assert low == pytest.approx(-high) and high > 0.4
    # Bonett and Price's formula by hand: (1/102, 11/102), so -10/102 around 1.96 * sqrt((12/102 - (10/102)**2) / 102).
    assert paired(0, 10, 100) == (pytest.approx(-0.1618, abs=1e-4), pytest.approx(-0.0343, abs=1e-4))
    assert paired(0, 1, 1) == (-1.0, pytest.approx(0.7335, abs=1e-3))
