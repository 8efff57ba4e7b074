"""What the kernel says about a process: whether it is stopped, and the work that it has done.

Read on the event loop: these are the kernel's own files, no disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

#: Ticks of processor time in a second.
TICKS: Final = os.sysconf("SC_CLK_TCK")


class Activity(NamedTuple):
    """``state`` is the letter of the kernel (``T`` stopped, ``t`` at a debugger, ``D`` waiting for a disk or memory).

    ``cpu`` is the processor time of all threads so far (ticks), ``moved`` the bytes that have been read and written.
    """

    state: str
    cpu: int
    moved: int = 0


def activity(pid: int, proc: Path = Path("/proc")) -> Activity | None:
    """The activity of a process; None where the system does not tell, or the process is gone."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return Activity(fields[0], int(fields[11]) + int(fields[12]), _moved(proc / str(pid) / "io"))
    except (OSError, IndexError, ValueError):
        return None


def _moved(path: Path) -> int:
    """Bytes read and written; 0 where the process may not be asked, as one of another user."""
    try:
        counts = dict(line.split(": ") for line in path.read_text().splitlines())
        return int(counts["rchar"]) + int(counts["wchar"]) + int(counts["read_bytes"])
    except (OSError, KeyError, ValueError):
        return 0
