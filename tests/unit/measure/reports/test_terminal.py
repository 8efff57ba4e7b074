"""A console wraps for a terminal and for nothing else."""

from __future__ import annotations

import os
import pty
import sys

import pytest
from rich.table import Table

from conch.measure.reports import terminal


def test_a_table_in_a_pipe_has_whole_rows_and_no_escape_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", "what")
    table.add_row("n" * 90, "[red]w[/red]" + "x" * 90)
    terminal.console().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert any("n" * 90 in line and "w" + "x" * 90 in line for line in lines)
    assert "\x1b" not in "".join(lines)


def test_a_name_that_a_terminal_cannot_hold_is_cut_with_a_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    monkeypatch.setenv("COLUMNS", "80")
    with os.fdopen(slave, "w") as screen, os.fdopen(master, "rb", buffering=0) as output:
        monkeypatch.setattr(sys, "stdout", screen)
        console = terminal.console()
        console.print("x" * 200, overflow="ellipsis", no_wrap=True)
        screen.flush()
        written = output.read(4096).decode()
    assert console.width == 80
    assert "…" in written
