"""``conch analyze profile`` as users run it: how it ends on signals, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.analyze import models
from tests.terminal import hear_ctrl_c

OPTIONS = (
    "--profile-models=waits", "--run-config-search-mode=brute", "--run-config-search-max-instance-count=2",
    "--run-config-search-min-model-batch-size=2", "--run-config-search-max-model-batch-size=2", "--concurrency=1,2,4",
    "--final-rounds=1",
    *(f"--perf-analyzer-flags={one}" for one in ("measurement-interval=300", "max-trials=3", "warm-up=0.1")),
    "-o", "csv,json",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_analysis_that_is_ended_says_how_to_continue_and_shows_what_it_has(
    tmp_path: Path, ending: signal.Signals
) -> None:
    models.write(tmp_path / "models")

    command = [sys.executable, "-m", "conch", "analyze", "profile", "-m", "models", *OPTIONS]
    analysis = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=hear_ctrl_c,
    )  # fmt: skip
    assert analysis.stderr is not None
    first = next(line for line in analysis.stderr if "waits_config_default at 1: " in line)
    started = psutil.Process(analysis.pid).children(recursive=True)

    os.killpg(analysis.pid, ending)  # as terminals and `timeout` do
    out, errors = analysis.communicate(timeout=60)

    assert "infer/s" in first
    assert analysis.returncode == 130
    assert "Interrupted. Run the same command to resume." in errors
    assert "Traceback" not in errors
    assert "The search was interrupted" in out
    assert json.loads((tmp_path / "analysis" / "analysis.json").read_text())["configurations"]
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []

    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    search, _, _ = again.stderr.partition("in turns")  # a second measurement may be of any load
    assert "taken from the journal" in search and "waits_config_default at 1: " not in search
    assert "The search was interrupted" not in again.stdout
