"""Commands whose output is piped into another: whole lines, no escape sequences, and no complaint when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def closed_early(arguments: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    """The command, whose standard output is no longer read."""
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "conch", *arguments]
        return subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(write)


@pytest.mark.parametrize("arguments", [["check", "{}"], ["serve", "--help-all"], ["--help"]])
def test_a_closed_output_pipe_gives_no_error_message(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "m" / "v1").mkdir(parents=True)
    done = closed_early([argument.format(tmp_path) for argument in arguments])
    assert b"Traceback" not in done.stderr
    assert b"Broken" not in done.stderr


def test_a_long_finding_is_one_line_without_escape_sequences(tmp_path: Path) -> None:
    (tmp_path / ("m" * 200) / "v1").mkdir(parents=True)
    done = subprocess.run([sys.executable, "-m", "conch", "check", str(tmp_path)], capture_output=True, text=True)
    [finding] = done.stdout.splitlines()
    assert len(finding) > 200
    assert "\x1b" not in done.stdout + done.stderr
