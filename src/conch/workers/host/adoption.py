"""Whether this process adopts orphans: only while a template forks, as others' orphans are none of its business.

For the event loops of all servers in this process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

_lock = Lock()
_forks = 0
_before = 0


@contextmanager
def adopting() -> Iterator[None]:
    """Have descendants whose parents end become children of this process.  Linux only; raises OSError."""
    global _forks, _before
    with _lock:
        if _forks == 0:
            _before = _adopts()
            _adopt(1)
        _forks += 1
    try:
        yield
    finally:
        with _lock:
            _forks -= 1
            if _forks == 0:
                _adopt(_before)


def _adopts() -> int:
    value = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return value.value


def _adopt(value: int) -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(value))


def _prctl(option: int, argument: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot adopt others")
