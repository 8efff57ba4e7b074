"""Reads process activity from ``/proc``: state, CPU time and bytes moved.

Read on the event loop: reading ``/proc`` does not touch a disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from conch.machine.process_memory import children_of

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
