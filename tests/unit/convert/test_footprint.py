"""The memory of a process that does one thing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from conch.convert.footprint import on_disk, resident


def test_memory_is_that_of_what_was_opened_and_of_nothing_here() -> None:
    steps: list[str] = []
    openings = {
        "small": partial(np.ones, 1),
        "large": partial(np.ones, 10_000_000),
        "wrong": partial(np.ones, "not a shape"),
    }

    small, large, wrong = resident(openings, 1, steps.append)

    assert steps == [f"measuring the memory of {name}" for name in openings]
    assert 5_000_000 < small < 200_000_000
    assert large - small > 70_000_000
    assert wrong == 0


def test_disk_is_the_sum_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").write_bytes(b"123")

    assert on_disk([tmp_path / "a", tmp_path / "b"]) == 8
