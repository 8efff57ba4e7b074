"""How much other programs had of the machine while a server was measured.

OpenMP's threads wait for each other by spinning: a single other program on one of two cores can cost a server that
computes with them nine tenths of its throughput, and another next to nothing.  Such figures compare nothing.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Final

import psutil

#: The share of the machine above which a measurement is said to be spoilt.
MOST: Final = 0.05


class Others:
    """Measures from its making on; ``tree`` gives the processes of the server, which are none of the others."""

    def __init__(self, tree: Callable[[], Iterable[psutil.Process]]) -> None:
        self._tree = tree
        self._begin = perf_counter()
        self._used, self._ours = self._now()

    def share(self) -> float:
        """Of all cores, the share that neither the server nor this program and its children have used."""
        used, ours = self._now()
        available = (perf_counter() - self._begin) * (psutil.cpu_count() or 1)
        return max(0.0, (used - self._used) - (ours - self._ours)) / available

    def _now(self) -> tuple[float, float]:
        times = psutil.cpu_times()
        used = times.user + times.nice + times.system
        spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        ours = sum(one.ru_utime + one.ru_stime for one in spent)
        for process in self._tree():
            cpu = process.cpu_times()
            ours += cpu.user + cpu.system
        return used, ours
