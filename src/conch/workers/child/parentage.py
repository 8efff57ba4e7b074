"""Ties a process to the server as its parent, so that it is killed when the server ends, and sets its name.

Runs in workers and templates, in any environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

#: Timeout for the server to adopt an orphan (s).
_ADOPTION_SECONDS = 10.0

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def end_with_parent() -> None:
    """On Linux, have the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def take_name(name: str) -> None:
    """On Linux, set the name shown by ``ps`` and ``top``, up to 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def become_child_of(server: int, parent: int) -> None:
    """Wait until ``parent`` has ended and ``server`` has adopted this process; exit if that fails."""
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.0005)
    end_with_parent()
    if os.getppid() != server:  # the server has ended, or another process adopts its orphans
        os._exit(1)
