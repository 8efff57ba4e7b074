"""The limit of open files: raised for the server, which has many connections, and as it was for its workers.

A model may wait for files with ``select``, which takes none beyond 1024, as the usual limit ensures.
"""

from __future__ import annotations

import resource
from typing import Final

#: More than any server needs; "unlimited" would be what somebody goes through from end to end.
_MOST: Final = 1 << 20

_before: tuple[int, int] | None = None


def raise_limit() -> tuple[int, int]:
    """Let this process open as many files as it may; returns the limit before and now.  Called once, at the start."""
    global _before
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= now:
        return soft, soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (now, hard))
    _before = soft, hard
    return soft, now


def restore_limit(pid: int) -> None:
    """Give a process that this one has just started the limit from before it was raised."""
    if _before is not None and hasattr(resource, "prlimit"):
        try:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _before)
        except OSError:  # it has ended already
            pass
