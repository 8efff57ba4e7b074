"""Measures the processor time of a thread and the threads that a library starts from it.

Unlike elapsed time, processor time does not depend on the other load of the machine.
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
#: Low bits of Linux's clock id for a thread's processor time (``CPUCLOCK_SCHED``, per thread); the high bits hold the
#: inverted thread id.
_THREAD_CLOCK: Final = 6


class ThreadGroup:
    """The threads of this process that are named ``name`` (at most 15 characters).

    A thread joins temporarily. Threads that it starts in that time stay in the group, because on Linux a new thread
    inherits the name of its parent.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Add the calling thread to the group."""
        file = _THREADS / str(threading.get_native_id()) / "comm"
        before = _name(file)
        _rename(file, self._name)
        try:
            yield
        finally:
            _rename(file, before)

    def seconds(self) -> float:
        """Return the processor time of the group (s), including all threads of the process that have ended.

        Ended threads are mostly those that a library started. Only differences are meaningful. Without Linux's
        ``/proc``, returns the processor time of the calling thread.
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
        # The second value exceeds the first only by the time of ended threads.
        return max(group, time.process_time() - others)


def _name(file: Path) -> str:
    try:
        return file.read_text().rstrip("\n")
    except OSError:
        return ""


def _rename(file: Path, name: str) -> None:
    with suppress(OSError):  # not on this system
        file.write_text(name)
