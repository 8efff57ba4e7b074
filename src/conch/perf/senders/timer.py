"""Wakes an event loop at a moment, to some ten microseconds: loops themselves know milliseconds only.

Linux's timerfd, where there is one; otherwise the loop's own timer.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from time import monotonic_ns
from typing import Final

_MONOTONIC: Final = 1
_NON_BLOCKING_CLOSED_ON_EXEC: Final = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_ABSOLUTE: Final = 1


class _Times(ctypes.Structure):
    """``struct itimerspec``: the interval, and when it begins."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


class PreciseTimer:
    """Calls ``wake`` on the loop at the moment that :meth:`at` was given last, once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._handle: asyncio.TimerHandle | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        create = getattr(self._libc, "timerfd_create", None)
        self._fd = create(_MONOTONIC, _NON_BLOCKING_CLOSED_ON_EXEC) if create is not None else -1
        if self._fd >= 0:
            loop.add_reader(self._fd, self._readable)

    def at(self, moment: int) -> None:
        """Wake at ``moment`` (ns, monotonic), at once if it is over."""
        if self._fd < 0:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0, moment - monotonic_ns()) / 1e9, self._wake)
            return
        times = _Times(0, 0, *divmod(max(1, moment), 1_000_000_000))
        if self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(times), None):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def _readable(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._wake()
