"""The processor time of a thread with the threads that a library starts from it.

How long something takes by the clock depends on what else the machine does; how much processor time it takes does not.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_THREADS: Final = Path("/proc/self/task")
#: Linux's number for the clock of a thread's processor time, beside the thread's id (``CPUCLOCK_SCHED``).
_THREAD_CLOCK: Final = 6


class ThreadGroup:
    """The threads of this process that are called ``name``, of at most 15 characters.

    A thread joins for a while, and those that it starts meanwhile belong to the group for good: Linux gives a new
    thread the name of the thread that starts it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Have the calling thread belong to the group."""
        file = _THREADS / str(threading.get_native_id()) / "comm"
        before = _name(file)
        _rename(file, self._name)
        try:
            yield
        finally:
            _rename(file, before)

    def seconds(self) -> float:
        """The processor time of the group's threads, and of all threads that have ended: a library's workers, mostly.

        Differences of it are what counts.  Without Linux's ``/proc``, that of the calling thread.
        """
        group = others = 0.0
        try:
            threads = [int(name) for name in os.listdir(_THREADS)]
        except OSError:
            return time.thread_time()
        for thread in threads:
            try:
                used = time.clock_gettime(~thread << 3 | _THREAD_CLOCK)
            except OSError:
                continue  # ended
            if _name(_THREADS / str(thread) / "comm") == self._name:
                group += used
            else:
                others += used
        # More than the group's own only by threads that have ended.
        return max(group, time.process_time() - others)


def _name(file: Path) -> str:
    try:
        return file.read_text().rstrip("\n")
    except OSError:
        return ""


def _rename(file: Path, name: str) -> None:
    with suppress(OSError):  # not on this system
        file.write_text(name)
