"""Measures the interference of other programs during a measurement.

OpenMP's threads wait for each other by spinning: a single other program on one of two cores can cost a server that uses
them nine tenths of its throughput, and another server almost nothing. Such figures cannot be compared.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Final

import psutil

#: The share of the machine above which a measurement counts as disturbed.
MOST: Final = 0.05


class Others:
    """Measures from its creation; ``tree`` returns the processes of the server, which do not count as interference."""

    def __init__(self, tree: Callable[[], Iterable[psutil.Process]]) -> None:
        self._tree = tree
        self._begin = perf_counter()
        self._used, self._ours = self._now()

    def share(self) -> float:
        """Return the share of all cores used by processes other than the server, this program and its children."""
        used, ours = self._now()
        available = (perf_counter() - self._begin) * (psutil.cpu_count() or 1)
        return max(0.0, (used - self._used) - (ours - self._ours)) / available

    def _now(self) -> tuple[float, float]:
        times = psutil.cpu_times()
        used = times.user + times.nice + times.system
        spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        ours = sum(usage.ru_utime + usage.ru_stime for usage in spent)
        for process in self._tree():
            cpu = process.cpu_times()
            ours += cpu.user + cpu.system
        return used, ours
