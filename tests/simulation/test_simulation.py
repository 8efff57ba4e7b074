"""The server keeps its promises in random programs, and with all seeds that ever found a fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: How long new seeds run (s); CI may set another time, and the first seed.
SECONDS = os.environ.get("SIMULATION_SECONDS", "4")
_ROOT = Path(__file__).resolve().parents[2]


def simulation(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the simulation in a separate process, because it replaces the clocks of its process."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)


def test_the_promises_of_the_design_hold_in_random_programs() -> None:
    first = os.environ.get("SIMULATION_SEED")
    chosen = ["--first", first] if first else []

    finished = simulation("--known", "--seconds", SECONDS, *chosen)

    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout[-20_000:] + finished.stderr[-5_000:]


def test_a_seed_runs_the_same_way_each_time() -> None:
    first, second = simulation("--seed", "1"), simulation("--seed", "1")

    assert first.stdout
    assert first.stdout == second.stdout
