"""How much memory a process has, for the log.  Used on the event loop: the kernel's own file is read, no disk."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """The bytes of a process that are in memory, of mapped files too; 0 where the system does not tell."""
    try:
        pages = (proc / str(pid) / "statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
