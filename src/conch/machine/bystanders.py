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

from conch.backends.native.threads import usable_cores
from conch.machine.throttling import times_throttled

#: Others that use no more than this share of the cores do not disturb; a quiet desktop has a few percent.
QUIET: Final = 0.1
#: Time that the host gave to its other guests while this one wanted to run disturbs sooner: it is taken from threads
#: that run, where other processes may use a core that is free.
STOLEN: Final = 0.02


@dataclass(frozen=True, slots=True)
class Interference:
    """What others took meanwhile: ``others`` is the share of the cores that other processes and other guests of the
    host used, ``stolen`` the guests' part of it, ``throttled`` how often the kernel stopped the group of what is
    measured."""

    others: float = 0.0
    stolen: float = 0.0
    throttled: int = 0

    @property
    def disturbs(self) -> bool:
        """Whether figures that were taken meanwhile are not to be relied on."""
        return self.others > QUIET or self.stolen > STOLEN or self.throttled > 0

    def __str__(self) -> str:
        """In words, as ``others used 34% of the cores, 5% went to other guests of the host``."""
        parts = [f"others used {self.others:.0%} of the cores"]
        if self.stolen > STOLEN:
            parts.append(f"{self.stolen:.0%} went to other guests of the host (steal)")
        if self.throttled:
            parts.append(f"the control group was stopped {self.throttled} times for want of quota (throttling)")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class CpuClocks:
    """Seconds since some moment: on the wall, of all processors together while they were not idle (taken by another
    guest of the host counts), of the threads of those that belong to the measurement, and those that were ``stolen``
    by other guests; ``throttled`` counts how often the group of this process was stopped."""

    wall: float
    busy: float
    own: float
    stolen: float = 0.0
    throttled: int = 0

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
        return cls(time.perf_counter(), busy, own, getattr(all_cpus, "steal", 0.0), times_throttled())


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
            max(0, now.throttled - before.throttled),
        )  # fmt: skip
