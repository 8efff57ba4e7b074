"""Correlations of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from conch.convert.statistics import kendall, ranks, spearman


def test_rank_statistics() -> None:
    a = np.array([1.0, 2.0, 2.0, 4.0])

    assert ranks(a).tolist() == [0, 1.5, 1.5, 3]
    assert spearman(a, a**3) == pytest.approx(1)
    assert spearman(a, -a) == pytest.approx(-1)
    assert kendall(np.array([1, 2, 3]), np.array([1, 3, 2])) == pytest.approx(1 / 3)
    assert kendall(np.ones(3), np.ones(3)) == spearman(np.ones(3), np.ones(3)) == 1
    assert kendall(np.ones(3), np.arange(3)) == spearman(np.ones(3), np.arange(3)) == 0
