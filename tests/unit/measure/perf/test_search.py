"""Levels one after the other, and by halves."""

from __future__ import annotations

from itertools import islice

import pytest

from conch.core.errors import ConchError
from conch.measure.perf.plan import Levels
from conch.measure.perf.run import LevelSearch


def _visited(search: LevelSearch, most: float) -> list[float]:
    """The levels that are asked for where the limit is kept up to ``most``."""
    visited = []
    for level in islice(search, 50):
        visited.append(level)
        search.note(0.1 if level <= most else 0.3)
    return visited


def test_levels_end_above_the_limit() -> None:
    assert _visited(LevelSearch(Levels(1, 5, 1)), 2) == [1, 2, 3, 4, 5]
    assert _visited(LevelSearch(Levels(1, 5, 1), 0.2), 2) == [1, 2, 3]
    assert _visited(LevelSearch(Levels(1, 0, 2), 0.2), 6) == [1, 3, 5, 7]


def test_halves_find_the_highest_level_within_the_limit() -> None:
    assert _visited(LevelSearch(Levels(1, 100, 1), 0.2, binary=True), 100) == [1, 100]
    assert _visited(LevelSearch(Levels(1, 100, 1), 0.2, binary=True), 0) == [1]
    for most in (1, 2, 37, 98, 99):
        visited = _visited(LevelSearch(Levels(1, 100, 1), 0.2, binary=True), most)
        assert max(level for level in visited if level <= most) == most and len(visited) < 11
    coarse = _visited(LevelSearch(Levels(1, 100, 10), 0.2, binary=True), 37)
    assert max(level for level in coarse if level <= 37) == 31 and len(coarse) < 8


def test_a_level_without_answers_is_above_every_limit() -> None:
    search = LevelSearch(Levels(1, 3, 1), 0.2)
    levels = iter(search)
    next(levels)
    search.note(None)
    assert list(levels) == []


def test_searches_without_end_are_refused() -> None:
    with pytest.raises(ConchError, match="--latency-threshold"):
        LevelSearch(Levels(1, 0, 1))
    with pytest.raises(ConchError, match="set both"):
        LevelSearch(Levels(1, 9, 1), binary=True)
    with pytest.raises(ConchError, match="set both"):
        LevelSearch(Levels(9, 9, 1), 0.2, binary=True)
