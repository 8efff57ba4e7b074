"""Ends what models started when their server has ended without doing so: ``python -I -S guard.py``.

Reads from its standard input, line by line, ``+PID`` when a worker has started and ``-PID`` when it has ended; each
leads a process group.  At the end of the input, which is the server's, or at ``.``, all groups that are left are
killed.  A worker itself ends with its server, but not what it has started.  Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Read until the server is gone, then act."""
    with suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as name:
        name.write("conch-guard")
    started: dict[int, str] = {}
    for line in sys.stdin:
        if line[0] == ".":
            break
        pid = int(line[1:])
        if line[0] == "+":
            started[pid] = start_of(pid)
        else:
            started.pop(pid, None)
    for pid, start in started.items():
        # The number of a group that has members is given to no new process; that of an empty one may be.
        if start_of(pid) in ("", start):
            kill(pid)


def start_of(pid: int) -> str:
    """When a process was started, in the kernel's terms; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as status:
            return status.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def kill(group: int) -> None:
    with suppress(OSError):  # it is empty
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
