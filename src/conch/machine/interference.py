"""How much of the machine others use while something is measured.

The kernel's clocks are passed in, so that tests need none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psutil

from conch.backends.base.threads import usable_cores
from conch.machine.throttling import seconds_throttled

#: Others that use no more than this share of the cores do not disturb; a quiet desktop has a few percent.
QUIET: Final = 0.1
#: Time that the host gave to its other guests while this one wanted to run disturbs sooner: it is taken from threads
#: that run, where other processes may use a core that is free.
STOLEN: Final = 0.02
#: Being stopped for less of the time than this is not worth a word.
THROTTLED: Final = 0.01


@dataclass(frozen=True, slots=True)
class Interference:
    """What others took meanwhile: ``others`` is the share of the cores that other processes and other guests of the
    host used, ``stolen`` the guests' part of it.  ``throttled`` is for how much of the cores' time the kernel stopped
    what is measured for want of quota: that is no disturbance, as a machine with that quota is always like this."""

    others: float = 0.0
    stolen: float = 0.0
    throttled: float = 0.0

    @property
    def disturbs(self) -> bool:
        """Whether figures that were taken meanwhile are not to be relied on."""
        return self.others > QUIET or self.stolen > STOLEN

    def __str__(self) -> str:
        """In words, as ``other processes used 34% of the cores, 5% went to other guests of the host``."""
        parts = [f"other processes used {self.others:.0%} of the cores"]
        if self.stolen > STOLEN:
            parts.append(f"{self.stolen:.0%} went to other guests of the host (steal)")
        if self.throttled > THROTTLED:
            parts.append(f"for {self.throttled:.0%} of the time the quota of processor time was used up (throttling)")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class CpuClocks:
    """Seconds since some moment: on the wall, of all processors together while they were not idle (taken by another
    guest of the host counts), of the threads of those that belong to the measurement, those that were ``stolen`` by
    other guests, and those for which the measurement's control groups were stopped."""

    wall: float
    busy: float
    own: float
    stolen: float = 0.0
    throttled: float = 0.0

    @classmethod
    def read(cls, own: float | None = None) -> CpuClocks:
        """The clocks now, with this process's threads unless ``own`` tells; the kernel counts in hundredths."""
        all_cpus = psutil.cpu_times()
        if own is None:
            times = os.times()
            own = times.user + times.system
        # The time of guests is part of ``user`` and ``nice``.
        idle = ("idle", "iowait", "guest", "guest_nice")
        busy = sum(seconds for name, seconds in all_cpus._asdict().items() if name not in idle)
        return cls(time.perf_counter(), busy, own, getattr(all_cpus, "steal", 0.0), seconds_throttled())


class InterferenceMeter:
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

    def since_last(self) -> Interference:
        """What others took since the call before."""
        before, self._last = self._last, self._read()
        return self._between(before)

    def since_first(self) -> Interference:
        """What others took since this was made."""
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
