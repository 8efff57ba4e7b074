"""Runs perf_analyzer with windows that are long enough for slow machines."""

from __future__ import annotations

import re

from tests.oracle.run import perf_analyzer


def ask_perf_analyzer(*arguments: str, seconds: float) -> tuple[float, float]:
    """Return the throughput (1/s) and the latency (µs) that perf_analyzer measures in windows of ``seconds``.

    It fails if a window has no response, and is then run with longer windows. Raises RuntimeError with its output if
    it still has no result.
    """
    for window in (seconds, 4 * seconds, 16 * seconds):
        done = perf_analyzer(*arguments, "-p", str(int(window * 1000)), "-s", "900", "-r", "4")
        match = re.search(r"throughput: ([\d.]+) infer/sec, latency (\d+) usec", done.stdout)
        if match is not None:
            return float(match[1]), float(match[2])
    raise RuntimeError(f"perf_analyzer: {done.stdout[-500:]}{done.stderr[-500:]}")
