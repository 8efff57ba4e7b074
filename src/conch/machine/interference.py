"""Measures interference: the use of the machine by other processes during a measurement.

The kernel's clocks are an argument, so that tests need none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psutil

from conch.machine.cgroups import seconds_throttled
from conch.machine.cores import usable_cores

#: Maximum use by other processes, as a fraction of the cores, that does not disturb a measurement. A quiet desktop uses
#: a few percent.
QUIET: Final = 0.1
#: The same limit for stolen time. It is lower because the host takes it from running threads, while other processes may
#: use idle cores.
STOLEN: Final = 0.02
#: Minimum throttled fraction of the time that is reported.
THROTTLED: Final = 0.01


@dataclass(frozen=True, slots=True)
class Interference:
    """Interference during a measurement, as fractions of the time of the cores.

    ``others`` is the time that other processes and other guests of the host used, and ``stolen`` the part of the
    guests. ``throttled`` is the time for which the kernel stopped the measured processes because their CPU quota was
    used up. Throttling is no disturbance, as it is normal for a machine with that quota.
    """

    others: float = 0.0
    stolen: float = 0.0
    throttled: float = 0.0

    @property
    def disturbs(self) -> bool:
        """Whether figures of this measurement are unreliable."""
        return self.others > QUIET or self.stolen > STOLEN

    def __str__(self) -> str:
        """Describe the interference: ``other processes used 34% of the cores, 5% went to other guests of the host``."""
        parts = [f"other processes used {self.others:.0%} of the cores"]
        if self.stolen > STOLEN:
            parts.append(f"{self.stolen:.0%} went to other guests of the host (steal)")
        if self.throttled > THROTTLED:
            parts.append(f"for {self.throttled:.0%} of the time the quota of processor time was used up (throttling)")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class CpuClocks:
    """Clocks in seconds since an arbitrary time.

    ``wall`` is the elapsed time. ``busy`` is the time for which the processors were not idle, in total, including time
    stolen by other guests. ``own`` is the CPU time of the measurement's threads. ``stolen`` is the time stolen by other
    guests. ``throttled`` is the time for which the measurement's control groups were stopped.
    """

    wall: float
    busy: float
    own: float
    stolen: float = 0.0
    throttled: float = 0.0

    @classmethod
    def read(cls, own: float | None = None) -> CpuClocks:
        """Read the clocks; ``own`` defaults to this process's threads. The kernel's resolution is 10 ms."""
        all_cpus = psutil.cpu_times()
        if own is None:
            times = os.times()
            own = times.user + times.system
        # The time of guests is included in ``user`` and ``nice``.
        idle = ("idle", "iowait", "guest", "guest_nice")
        busy = sum(seconds for name, seconds in all_cpus._asdict().items() if name not in idle)
        return cls(time.perf_counter(), busy, own, getattr(all_cpus, "steal", 0.0), seconds_throttled())


class InterferenceMeter:
    """Measures the use of this process's cores by other processes."""

    def __init__(
        self, read: Callable[[], CpuClocks] = CpuClocks.read, *, cores: int | None = None, spare: int | None = None
    ) -> None:
        """Start the measurement.

        ``cores`` is the number of cores that this process may use. ``spare`` is the number of the machine's other
        cores, on which other processes do not disturb.
        """
        self._read = read
        self._cores = usable_cores() if cores is None else cores
        self._spare = max(0, (psutil.cpu_count() or self._cores) - self._cores) if spare is None else spare
        self._first = self._last = read()

    def since_last(self) -> Interference:
        """Return the interference since the last call."""
        before, self._last = self._last, self._read()
        return self._between(before)

    def since_first(self) -> Interference:
        """Return the interference since the start."""
        self._last = self._read()
        return self._between(self._first)

    def _between(self, before: CpuClocks) -> Interference:
        now = self._last
        wall = now.wall - before.wall
        if wall <= 0:
            return Interference()
        others = (now.busy - before.busy) - (now.own - before.own) - self._spare * wall
        every = (self._cores + self._spare) * wall
        stolen = (now.stolen - before.stolen) / every
        return Interference(
            min(1.0, max(0.0, others / (self._cores * wall))), min(1.0, max(0.0, stolen)),
            min(1.0, max(0.0, (now.throttled - before.throttled) / (self._cores * wall))),
        )  # fmt: skip
