"""Raises the limit of open files for the server, which has many connections, and restores it for workers.

Models may use ``select``, which fails for descriptors of 1024 or more; the usual limit of 1024 prevents them.
"""

from __future__ import annotations

import resource
from typing import Final

#: More than any server needs. It replaces "unlimited", because some programs loop over all possible descriptors.
_MOST: Final = 1 << 20

_before: tuple[int, int] | None = None


def raise_limit() -> tuple[int, int]:
    """Raise the soft limit to the hard limit; return the old and new soft limit. Called once, at startup."""
    global _before
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= now:
        return soft, soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (now, hard))
    _before = soft, hard
    return soft, now


def restore_limit(pid: int) -> None:
    """Restore the original limit for a process that this one has just started."""
    if _before is not None and hasattr(resource, "prlimit"):
        try:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _before)
        except OSError:  # the process has ended
            pass
