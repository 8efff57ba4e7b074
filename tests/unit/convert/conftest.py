"""Conversions of tests."""

from __future__ import annotations

import pytest


def leave_pages_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let conversions write an empty HTML report: drawing its charts takes as long as exporting a tiny network."""
    monkeypatch.setattr("conch.convert.run.write_report", lambda report, path: path.touch())


@pytest.fixture(autouse=True)
def empty_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions of a test do not draw the charts of their HTML report; those of module fixtures do."""
    leave_pages_empty(monkeypatch)
