"""How much memory the process may use: the machine's, or what control groups leave of it.

Called once by whoever divides memory up; needs the standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from conch.telemetry.cgroups import limits

#: Version 1 says "no limit" with a number close to 2**63.
_UNLIMITED: Final = 2**60


def usable_memory(root: Path = Path("/")) -> int:
    """The bytes of memory that the process may use; ``root`` is where ``proc`` and ``sys`` are mounted."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, group_limit(root) or total)


def group_limit(root: Path = Path("/")) -> int:
    """The least that a control group allows (bytes); 0 where none sets a limit."""
    found = limits("memory", lambda group: _number(group / "memory.max"), _v1, root)
    return min((int(limit) for limit in found if limit < _UNLIMITED), default=0)


def _v1(group: Path) -> float | None:
    return _number(group / "memory.limit_in_bytes")


def _number(path: Path) -> float | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None
