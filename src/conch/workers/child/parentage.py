"""Whose child a process is: the server's, whose end is its own; and what it is called.

Runs in workers and templates, in any environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

#: How long a server may take to adopt an orphan (s).
_ADOPTION_SECONDS = 10.0

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def end_with_parent() -> None:
    """On Linux, have this process killed when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def take_name(name: str) -> None:
    """On Linux, have ``ps`` and ``top`` call this process ``name``, of 15 characters at most."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def become_child_of(server: int, parent: int) -> None:
    """Return once ``server`` has adopted this process, whose ``parent`` is about to end; end it if that fails."""
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.0005)
    end_with_parent()
    if os.getppid() != server:  # it has ended, or somebody else adopts its orphans
        os._exit(1)
