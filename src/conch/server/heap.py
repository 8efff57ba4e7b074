"""Gives memory back to the system that the C library keeps after large bodies have been freed.

glibc takes blocks from heaps, and a heap shrinks only from its end: one small block there keeps hundreds of megabytes.
For a busy server it is right to keep them, since its next body goes into the same pages, and fresh ones cost more than
all else that is done for a body; one that is at rest should give them back.  Made by :mod:`conch.app`; looks at the
process twice a second, on its event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from time import process_time
from typing import Final

from conch.machine.process_memory import resident_bytes

PERIOD: Final = 0.5
#: A server that computed for no more than this share of a period was at rest.
_REST: Final = 0.2
#: Options of ``mallopt`` (malloc.h of glibc) and their values: one heap; blocks of less than 32 MiB, the most that it
#: takes, come from it; and it keeps as much as 64 MiB at its end.  By itself glibc comes to these sizes only where
#: blocks of 32 MiB are freed, and takes fresh pages for every body of 1 MiB.
_OPTIONS: Final = {"M_ARENA_MAX": (-8, 1), "M_MMAP_THRESHOLD": (-3, 32 << 20), "M_TRIM_THRESHOLD": (-1, 64 << 20)}
#: What is worth the trouble (bytes): more than the process once got by with, and more than the last trial left.
_WORTH: Final = 16 << 20
_GROWTH: Final = 1 << 20
#: How many periods after it came to rest a server is trimmed: some of what it had is freed only in the seconds after.
_TRIALS: Final = frozenset({1, 2, 4, 8, 16, 32})


class HeapTrimmer:
    """Trims the heap when the process has come to rest and has more memory than it once got by with.

    ``trim`` is called in a thread; ``resident`` and ``computed`` tell the bytes in memory and the seconds of processor
    time of this process.
    """

    def __init__(
        self,
        trim: Callable[[], object],
        resident: Callable[[], int] = lambda: resident_bytes(os.getpid()),
        computed: Callable[[], float] = process_time,
    ) -> None:
        self._trim = trim
        self._resident = resident
        self._computed = computed
        self._loop = asyncio.get_running_loop()
        self._least = self._left = resident()
        self._rested = 0
        self._before = computed()
        self._timer = self._loop.call_later(PERIOD, self._look)
        self._trimming: asyncio.Future[object] | None = None

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        before, self._before = self._before, self._computed()
        self._timer = self._loop.call_later(PERIOD, self._look)
        resident = self._resident()
        self._least = min(resident, self._least)
        busy = self._before - before > _REST * PERIOD
        if busy or resident > self._left + _GROWTH:
            self._left = resident
            self._rested = 0
        if busy:
            return
        self._rested += 1
        if self._rested not in _TRIALS or self._trimming is not None or resident < self._least + _WORTH:
            return
        self._trimming = self._loop.run_in_executor(None, self._trim)
        self._trimming.add_done_callback(self._trimmed)

    def _trimmed(self, trimming: asyncio.Future[object]) -> None:
        self._trimming = None
        self._left = self._resident()


def heap_trimmer() -> HeapTrimmer | None:
    """Start trimming; None where the C library has nothing for it, or gives all memory back by itself."""
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return HeapTrimmer(lambda: malloc_trim(0))


def keep_to_one_heap() -> None:
    """Have all threads of this process share one heap, which keeps its pages while they are used again.

    Call before threads start; without effect where the C library has no such options.  Trimming gives back the end of
    the first heap alone, and each thread that inflates a message may have a heap of its own with as much as 64 MiB.
    The interpreter's lock leaves little to be gained from several.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in _OPTIONS.values():
        mallopt(option, value)
