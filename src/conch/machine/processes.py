"""Measures the CPU time of groups of processes, and finds the busiest other processes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

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
            for number, members in enumerate(families):
                if process.pid in members:
                    self._group_of.setdefault(key, number)
        used = [0.0] * len(self._groups)
        for key, number in self._group_of.items():
            used[number] += self._used[key] - self._at_first.get(key, 0.0)
        return used

    def rivals(self, seconds: float, most: int = 3) -> tuple[Rival, ...]:
        """Return the busiest processes outside of the groups over the ``seconds`` since the start, combined by name."""
        cores: Counter[str] = Counter()
        for key, used in self._used.items():
            if key not in self._group_of and seconds > 0:
                cores[self._names[key]] += (used - self._at_first.get(key, 0.0)) / seconds  # type: ignore[assignment]
        return tuple(Rival(name, used) for name, used in cores.most_common(most) if used >= _WORTH_NAMING)
