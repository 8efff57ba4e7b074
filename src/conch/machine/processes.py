"""Activity of processes from ``/proc``, and interference: the use of the machine by others during a measurement.

Reading ``/proc`` does not touch a disk, so this may run on the event loop. The kernel's clocks are an argument, so that
tests need none.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from conch.machine.facts import usable_cores
from conch.machine.memory import children_of, seconds_throttled

#: CPU time ticks per second.
TICKS: Final = os.sysconf("SC_CLK_TCK")
#: Bytes that the kernel reads for a major page fault of a mapped file, with read-ahead.
_READ_AHEAD: Final = 128 << 10


class Activity(NamedTuple):
    """The activity of a process.

    ``state`` is the kernel's state letter (``T`` stopped, ``t`` traced by a debugger, ``D`` waiting for a disk or
    memory). ``cpu`` is the total CPU time of all threads (ticks). ``moved`` is the number of bytes read and written;
    reads of mapped files are estimated from page faults, because not every file system counts them.
    """

    state: str
    cpu: int
    moved: int = 0


def activity(pid: int, proc: Path = Path("/proc")) -> Activity | None:
    """Return the activity of a process; None if ``/proc`` is unavailable or the process has ended."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        moved = _moved(proc / str(pid) / "io") + int(fields[9]) * _READ_AHEAD
        return Activity(fields[0], int(fields[11]) + int(fields[12]), moved)
    except (OSError, IndexError, ValueError):
        return None


def children_activity(pid: int, proc: Path = Path("/proc")) -> Activity | None:
    """Return the summed activity of all descendants, with an empty ``state``; None if there are none."""
    readings = []
    for child in children_of(pid, proc):
        readings += [
            reading for reading in (activity(child, proc), children_activity(child, proc)) if reading is not None
        ]
    return (
        Activity("", sum(reading.cpu for reading in readings), sum(reading.moved for reading in readings))
        if readings
        else None
    )


def _moved(path: Path) -> int:
    """Return the bytes read and written; 0 if not permitted, for example for a process of another user."""
    try:
        counts = dict(line.split(": ") for line in path.read_text().splitlines())
        return int(counts["rchar"]) + int(counts["wchar"]) + int(counts["read_bytes"])
    except (OSError, KeyError, ValueError):
        return 0


#: Minimum use of a listed process (cores, on average).
_WORTH_NAMING: Final = 0.02


@dataclass(frozen=True, slots=True)
class ProcessTime:
    """A process and the CPU time of its threads (s) since it ``started`` (s, system clock)."""

    pid: int
    parent: int
    name: str
    started: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Rival:
    """Other processes of one name, and the number of cores that they used on average."""

    name: str
    cores: float

    def __str__(self) -> str:
        return f"{self.name} {self.cores:.2f}"


def process_times() -> list[ProcessTime]:
    """Return all visible processes; takes a few milliseconds per hundred processes."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error), process.oneshot():
            times = process.cpu_times()
            processes.append(
                ProcessTime(
                    process.pid, process.ppid(), process.name(), process.create_time(), times.user + times.system
                )
            )
    return processes


def family(processes: Iterable[ProcessTime], roots: Iterable[int]) -> set[int]:
    """Return ``roots`` and their running descendants."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for process in processes:
        children[process.parent].append(process.pid)
    pids: set[int] = set()
    left = list(roots)
    while left:
        pid = left.pop()
        if pid not in pids:
            pids.add(pid)
            left += children[pid]
    return pids


class ProcessTimes:
    """The CPU time of groups of processes, defined by their roots, and of all other processes.

    An ended process keeps the CPU time of its last reading, so that the time of a group never decreases.
    """

    def __init__(
        self, groups: Sequence[Iterable[int]], read: Callable[[], Sequence[ProcessTime]] = process_times
    ) -> None:
        self._groups = [tuple(roots) for roots in groups]
        self._read = read
        self._used: dict[tuple[int, float], float] = {}
        self._group_of: dict[tuple[int, float], int] = {}
        self._names: dict[tuple[int, float], str] = {}
        self._at_first: dict[tuple[int, float], float] = {}
        self.read()
        self._at_first = dict(self._used)

    def read(self) -> list[float]:
        """Return the CPU time of each group since the start (s)."""
        processes = self._read()
        families = [family(processes, roots) for roots in self._groups]
        for process in processes:
            key = (process.pid, process.started)
            self._used[key] = process.seconds
            self._names[key] = process.name
            for number, pids in enumerate(families):
                if process.pid in pids:
                    self._group_of.setdefault(key, number)
        used = [0.0] * len(self._groups)
        for key, number in self._group_of.items():
            used[number] += self._used[key] - self._at_first.get(key, 0.0)
        return used

    def rivals(self, seconds: float, limit: int = 3) -> tuple[Rival, ...]:
        """Return the busiest processes outside of the groups over the ``seconds`` since the start, combined by name."""
        cores: Counter[str] = Counter()
        for key, used in self._used.items():
            if key not in self._group_of and seconds > 0:
                cores[self._names[key]] += (used - self._at_first.get(key, 0.0)) / seconds  # type: ignore[assignment]
        return tuple(Rival(name, used) for name, used in cores.most_common(limit) if used >= _WORTH_NAMING)


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
    used up. Throttling does not count as a disturbance, because it is normal on a machine with that quota.
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
            parts.append(f"the CPU quota was used up for {self.throttled:.0%} of the time (throttling)")
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
