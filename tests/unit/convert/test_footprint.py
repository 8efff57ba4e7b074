"""The memory of a process that does one thing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from conch.convert.footprint import on_disk, resident


def test_memory_is_that_of_what_was_opened_and_of_nothing_here() -> None:
    small, large, wrong = resident(
        [partial(np.ones, 1), partial(np.ones, 10_000_000), partial(np.ones, "not a shape")], at_once=1
    )

    assert 5_000_000 < small < 200_000_000
    assert large - small > 70_000_000
    assert wrong == 0


def test_disk_is_the_sum_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").write_bytes(b"123")

    assert on_disk([tmp_path / "a", tmp_path / "b"]) == 8
