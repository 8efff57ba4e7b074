"""The memory of a process, as the kernel tells it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conch.workers.host.memory import resident_bytes


def test_memory_is_counted_in_pages(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "statm").write_text("900 300 20 1 0 80 0")
    assert resident_bytes(7, tmp_path) == 300 * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("content", [None, "", "900", "nonsense here"])
def test_nothing_is_said_where_nothing_is_known(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "statm").write_text(content)
    assert resident_bytes(7, tmp_path) == 0
