"""Writes models for one test."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.unit.testing.models import BATCHED, PREAMBLE, Write


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a model: ``write(source)``; its configuration is ``BATCHED`` and more lines."""

    def write(source: str, *lines: str, name: str = "m", config: str = BATCHED) -> Path:
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text("\n".join([config, *lines]))
        (tmp_path / name / "1" / "model.py").write_text(PREAMBLE + textwrap.dedent(source))
        return tmp_path / name

    return write
