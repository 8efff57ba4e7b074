"""What the kernel says about a process: whether it is stopped, and the work that it and its children have done.

Read on the event loop: these are the kernel's own files, no disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from conch.telemetry.processes import children_of

#: Ticks of processor time in a second.
TICKS: Final = os.sysconf("SC_CLK_TCK")
#: What the kernel reads ahead for a page of a mapped file that is not in memory (bytes).
_READ_AHEAD: Final = 128 << 10


class Activity(NamedTuple):
    """``state`` is the letter of the kernel (``T`` stopped, ``t`` at a debugger, ``D`` waiting for a disk or memory).

    ``cpu`` is the processor time of all threads so far (ticks), ``moved`` the bytes that have been read and written,
    those of mapped files estimated by their page faults, since not every file system counts them.
    """

    state: str
    cpu: int
    moved: int = 0


def activity(pid: int, proc: Path = Path("/proc")) -> Activity | None:
    """The activity of a process; None where the system does not tell, or the process is gone."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        moved = _moved(proc / str(pid) / "io") + int(fields[9]) * _READ_AHEAD
        return Activity(fields[0], int(fields[11]) + int(fields[12]), moved)
    except (OSError, IndexError, ValueError):
        return None


def children_activity(pid: int, proc: Path = Path("/proc")) -> Activity | None:
    """The work of all descendants together, whose state has no letter; None where there are none."""
    found = []
    for child in children_of(pid, proc):
        found += [one for one in (activity(child, proc), children_activity(child, proc)) if one is not None]
    return Activity("", sum(one.cpu for one in found), sum(one.moved for one in found)) if found else None


def _moved(path: Path) -> int:
    """Bytes read and written; 0 where the process may not be asked, as one of another user."""
    try:
        counts = dict(line.split(": ") for line in path.read_text().splitlines())
        return int(counts["rchar"]) + int(counts["wchar"]) + int(counts["read_bytes"])
    except (OSError, KeyError, ValueError):
        return 0
