"""Temporary folders that are gone at the next start of a server, too, when the process that made them was killed.

Each has a file that its process keeps locked: a folder whose lock can be taken belongs to nobody any more.  Used by the
server and by workers, from any thread.
"""

from __future__ import annotations

import os
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from types import TracebackType
from typing import Final

try:
    import fcntl
except ImportError:  # not on this system: nothing is recognised later
    fcntl = None  # type: ignore[assignment]

_PREFIX: Final = "conch-"
#: What such a folder holds, in the order in which it is removed: an interrupted removal is gone on with.
_CONTENT: Final = "content"
_LOCK: Final = "lock"


class TemporaryFolder:
    """``path``, until ``close``, the end of the context, of the object or of this process.  Raises OSError."""

    def __init__(self, kind: str = "") -> None:
        home = Path(tempfile.mkdtemp(prefix=_PREFIX + (f"{kind}-" if kind else "")))
        self.path = home / _CONTENT
        lock = -1
        try:
            lock = _locked(home)
            self.path.mkdir()
        except OSError:
            _remove(home, lock, os.getpid())
            raise
        self._removal = weakref.finalize(self, _remove, home, lock, os.getpid())

    def close(self) -> None:
        """Remove it, with what is in it."""
        self._removal()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_orphans() -> list[Path]:
    """Remove the folders that processes of this user left in the temporary directory; returns them."""
    removed = []
    with os.scandir(tempfile.gettempdir()) as entries:
        homes = [
            Path(entry.path)
            for entry in entries
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False)
        ]
    for home in homes:
        with suppress(OSError), _lock_of_orphan(home) as lock:
            if lock >= 0:
                _remove_files(home)
                removed.append(home)
    return removed


def _locked(home: Path) -> int:
    """The descriptor of a new lock in ``home``, which appears there locked; -1 where the file system has no locks."""
    if fcntl is None:
        return -1
    new = home / f"{_LOCK}.new"
    fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(home / _LOCK)
    except OSError:
        os.close(fd)
        new.unlink()
        return -1
    return fd


@contextmanager
def _lock_of_orphan(home: Path) -> Iterator[int]:
    """Hold the lock of ``home``; yields -1 if somebody else does.  Raises OSError for what is no such folder.

    Nothing is followed: a link has no lock, nor has a folder of another user.
    """
    if fcntl is None:
        yield -1
        return
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fd = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            ours = all(os.fstat(one).st_uid == os.geteuid() for one in (folder, fd))
            if ours and stat.S_ISREG(os.fstat(fd).st_mode):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield fd
            else:
                yield -1
        finally:
            os.close(fd)
    finally:
        os.close(folder)


def _remove(home: Path, lock: int, owner: int) -> None:
    """Remove a folder of this process; a process that was forked from its ``owner`` leaves it alone."""
    if os.getpid() == owner:
        with suppress(OSError):
            _remove_files(home)
    if lock >= 0:
        os.close(lock)


def _remove_files(home: Path) -> None:
    rmtree(home / _CONTENT, ignore_errors=True)
    if not (home / _CONTENT).exists():
        (home / _LOCK).unlink(missing_ok=True)
        home.rmdir()
