"""Which files the server's workers have mapped: shared memory of their own, which is no client's to register.

Engines and libraries in workers make such memory under names that anybody can list.  Linux only; elsewhere nothing is
found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from conch.telemetry.processes import children_of


def is_mapped(file: os.stat_result, roots: Iterable[int], proc: Path = Path("/proc")) -> bool:
    """Whether one of the processes ``roots``, or a descendant, has mapped or opened a file."""
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}", str(file.st_ino)
    return any(
        _maps(wanted, proc / str(pid)) or _opens(file, proc / str(pid)) for root in roots for pid in _family(root, proc)
    )


def _family(pid: int, proc: Path) -> Iterator[int]:
    yield pid
    for child in children_of(pid, proc):
        yield from _family(child, proc)


def _maps(wanted: tuple[str, str], process: Path) -> bool:
    """Whether a process has mapped the file with a device and an inode, as the kernel writes them."""
    try:
        with open(process / "maps", "rb") as lines:
            return any(tuple(line.decode("latin-1").split(None, 5)[3:5]) == wanted for line in lines)
    except OSError:  # it has ended
        return False


def _opens(file: os.stat_result, process: Path) -> bool:
    try:
        descriptors = os.listdir(process / "fd")
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            if os.path.samestat(os.stat(process / "fd" / descriptor), file):
                return True
        except OSError:  # closed meanwhile
            continue
    return False
