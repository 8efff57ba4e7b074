"""The machine that variants are measured on: what it is, and how much of it others use meanwhile.

Looked at in the process of ``conch convert``; the kernel's clocks are passed in, so that tests need none.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from conch.backends.native.threads import usable_cores

#: Others that use no more than this share of the cores do not disturb; a quiet desktop has a few percent.
QUIET: Final = 0.1


@dataclass(frozen=True, slots=True)
class CpuClocks:
    """Seconds since some moment: on the wall, of all processors together while they were not idle (taken by another
    guest of the host counts), and of this process's threads."""

    wall: float
    busy: float
    own: float

    @classmethod
    def read(cls) -> CpuClocks:
        """The clocks now; the kernel counts in hundredths of a second."""
        all_cpus, own = psutil.cpu_times(), os.times()
        # The time of guests is part of ``user`` and ``nice``.
        idle = ("idle", "iowait", "guest", "guest_nice")
        busy = sum(seconds for name, seconds in all_cpus._asdict().items() if name not in idle)
        return cls(time.perf_counter(), busy, own.user + own.system)


class Bystanders:
    """How much of the cores that this process may use other processes use."""

    def __init__(
        self, read: Callable[[], CpuClocks] = CpuClocks.read, *, cores: int | None = None, spare: int | None = None
    ) -> None:
        """``cores`` are those that this process may use, and ``spare`` the machine's other ones, where others do not
        disturb."""
        self._read = read
        self._cores = usable_cores() if cores is None else cores
        self._spare = max(0, (psutil.cpu_count() or self._cores) - self._cores) if spare is None else spare
        self._first = self._last = read()

    def since_last(self) -> float:
        """The share since the call before, from 0 to 1."""
        before, self._last = self._last, self._read()
        return self._share(before)

    def since_first(self) -> float:
        """The share since this was made."""
        self._last = self._read()
        return self._share(self._first)

    def _share(self, before: CpuClocks) -> float:
        wall = self._last.wall - before.wall
        others = (self._last.busy - before.busy) - (self._last.own - before.own) - self._spare * wall
        return min(1.0, max(0.0, others / (self._cores * wall))) if wall > 0 else 0.0


def description(load_before: float, others: float) -> Mapping[str, Any]:
    """The machine for the manifest: ``load_before`` is its load average before the conversion, and ``others`` the share
    of the cores that other processes used while variants were measured."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "load_before": round(load_before, 2),
        "load_during": round(load_average(), 2),
        "others": round(others, 3),
    }


def load_average() -> float:
    """How many threads ran or waited to run, on average over the last minute."""
    return os.getloadavg()[0]


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor by the name that it has for itself, else by its architecture."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()
