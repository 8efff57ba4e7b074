"""Kills processes that models started if the server dies without doing so: ``python -I -S guard.py``.

Reads lines from standard input: ``+PID`` when a worker has started and ``-PID`` when it has ended; each worker leads a
process group. At the end of the input (the server has ended) or at ``.``, kills all remaining groups. Workers end with
the server, but their child processes do not. Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Read until the server has ended, then kill the remaining process groups."""
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
        # The kernel may reuse the id of an empty group for a new process, but not the id of a group with members.
        if start_of(pid) in ("", start):
            kill(pid)


def start_of(pid: int) -> str:
    """Return the start time of a process (clock ticks since boot, as text); empty if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as status:
            return status.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def kill(group: int) -> None:
    with suppress(OSError):  # the group is empty
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
