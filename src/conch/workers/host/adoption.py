"""Whether this process adopts orphans: only while a template forks.

Otherwise it leaves them to init.  Unrelated processes that become orphans during a fork are adopted too, and waited
for.  Serves the event loops of all servers in this process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

#: How often children that may have been adopted are looked at (s).
LOOK_SECONDS = 10.0
#: How long one that has ended is left to whoever in this process may have started it (s).
CLAIM_SECONDS = 60.0

_lock = Lock()
_forks = 0
_before = 0
_children_before: set[int] = set()


@contextmanager
def adopting() -> Iterator[None]:
    """Have descendants whose parents end become children of this process.  Linux only; raises OSError."""
    global _forks, _before, _children_before
    with _lock:
        if _forks == 0:
            _before = _adopts()
            _children_before = _children()
            _adopt(1)
        _forks += 1
    try:
        yield
    finally:
        with _lock:
            _forks -= 1
            if _forks == 0:
                _adopt(_before)
                _REAPER.watch(_children() - _children_before)


class _Reaper:
    """Waits for children that nobody else waits for, in a thread that runs as long as there may be any.

    A child that began during a fork was adopted, or started by another part of this process, which cannot be told:
    whoever started one waits for it soon after its end.
    """

    def __init__(self) -> None:
        #: When each was first seen to have ended, None while it runs.
        self._ended: dict[int, float | None] = {}
        self._lock = Lock()
        self._thread: Thread | None = None

    def watch(self, pids: set[int]) -> None:
        with self._lock:
            self._ended.update(dict.fromkeys(pids))
            if self._ended and self._thread is None:
                self._thread = Thread(target=self._run, name="conch-reaper", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not Event().wait(LOOK_SECONDS):
            with self._lock:
                for pid in list(self._ended):
                    self._look(pid)
                if not self._ended:
                    self._thread = None
                    return

    def _look(self, pid: int) -> None:
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # its owner has waited for it
            del self._ended[pid]
            return
        if ended is None:
            return
        since = self._ended[pid] = self._ended[pid] or monotonic()
        if monotonic() - since >= CLAIM_SECONDS:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            del self._ended[pid]


_REAPER = _Reaper()


def _children() -> set[int]:
    """The children of all threads of this process; none where the kernel does not list them."""
    children: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            children.update(map(int, path.read_text().split()))
    return children


def _adopts() -> int:
    value = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return value.value


def _adopt(value: int) -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(value))


def _prctl(option: int, argument: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot adopt others")
