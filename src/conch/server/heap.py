"""Returns freed memory to the operating system after large request bodies have been processed.

glibc allocates blocks from heaps, and a heap shrinks only at its end: one small block there retains hundreds of
megabytes. A busy server should keep that memory, because the next body reuses its pages, and new pages cost more than
the rest of the processing. An idle server should return it. Created by :mod:`conch.library.app`; checks the process
twice a second, on its event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from time import process_time
from typing import Final

from conch.machine.memory import heap_trim, resident_bytes

PERIOD: Final = 0.5
#: Maximum fraction of a core that an idle server uses.
_REST: Final = 0.2
#: Options of ``mallopt`` (malloc.h of glibc) and their values: one heap; blocks of less than 32 MiB, the maximum, come
#: from it; up to 64 MiB are kept at its end. By default, glibc reaches these sizes only after blocks of 32 MiB have
#: been freed, and takes new pages for every body of 1 MiB.
_OPTIONS: Final = {"M_ARENA_MAX": (-8, 1), "M_MMAP_THRESHOLD": (-3, 32 << 20), "M_TRIM_THRESHOLD": (-1, 64 << 20)}
#: Memory above the minimum so far from which the heap is trimmed, and growth after which trims start again (bytes).
_WORTH: Final = 16 << 20
_GROWTH: Final = 1 << 20
#: Numbers of idle periods after which the heap is trimmed; some memory is freed only seconds after the last request.
_TRIALS: Final = frozenset({1, 2, 4, 8, 16, 32})


class HeapTrimmer:
    """Trims the heap when the process is idle and uses more memory than its minimum so far.

    ``trim`` is called in a thread. ``resident`` returns the memory (bytes) and ``computed`` the CPU time (s) of this
    process.
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
        self._minimum = self._left = resident()
        self._rested = 0
        self._before = computed()
        self._timer = self._loop.call_later(PERIOD, self._check)
        self._trimming: asyncio.Future[object] | None = None

    def close(self) -> None:
        """Stop the checks."""
        self._timer.cancel()

    def _check(self) -> None:
        before, self._before = self._before, self._computed()
        self._timer = self._loop.call_later(PERIOD, self._check)
        resident = self._resident()
        self._minimum = min(resident, self._minimum)
        busy = self._before - before > _REST * PERIOD
        if busy or resident > self._left + _GROWTH:
            self._left = resident
            self._rested = 0
        if busy:
            return
        self._rested += 1
        if self._rested not in _TRIALS or self._trimming is not None or resident < self._minimum + _WORTH:
            return
        self._trimming = self._loop.run_in_executor(None, self._trim)
        self._trimming.add_done_callback(self._trimmed)

    def _trimmed(self, trimming: asyncio.Future[object]) -> None:
        self._trimming = None
        self._left = self._resident()


def heap_trimmer() -> HeapTrimmer | None:
    """Start trimming; return None if the C library does not have ``malloc_trim``."""
    trim = heap_trim()
    return HeapTrimmer(trim) if trim is not None else None


def use_one_heap() -> None:
    """Make all threads of this process share one heap, which keeps its pages for reuse.

    Call this before threads start; it has no effect if the C library lacks these options. A trim affects only the end
    of the first heap, while each thread that decompresses a message could have its own heap of up to 64 MiB. Because of
    the interpreter lock, several heaps have little benefit.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in _OPTIONS.values():
        mallopt(option, value)
