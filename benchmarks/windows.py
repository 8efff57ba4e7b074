"""One answer of perf_analyzer, however slow the machine is."""

from __future__ import annotations

import re

from tests.oracle.run import perf_analyzer


def ask_perf_analyzer(*arguments: str, seconds: float) -> tuple[float, float]:
    """The throughput (1/s) and the latency (us) that perf_analyzer finds in windows of ``seconds``.

    It fails where nothing is answered within a window, and is then asked for longer ones.  Raises RuntimeError with
    what it says where it finds nothing at all.
    """
    for window in (seconds, 4 * seconds, 16 * seconds):
        done = perf_analyzer(*arguments, "-p", str(int(window * 1000)), "-s", "900", "-r", "4")
        found = re.search(r"throughput: ([\d.]+) infer/sec, latency (\d+) usec", done.stdout)
        if found is not None:
            return float(found[1]), float(found[2])
    raise RuntimeError(f"perf_analyzer: {done.stdout[-500:]}{done.stderr[-500:]}")
