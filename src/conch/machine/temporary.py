"""Temporary folders, removed by their process or, if it was killed, by the next server that starts.

Each contains a file that its process keeps locked; a folder with an unlocked file is an orphan. Used by the server and
by workers, from any thread.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Final

_PREFIX: Final = "conch-"
#: Entries of such a folder, in order of removal, so that an interrupted removal can be resumed.
_CONTENT: Final = "content"
_LOCK: Final = "lock"


class TemporaryFolder:
    """A folder at ``path``, removed by ``close``, at the end of the context, or with this object or its process.

    Raises OSError if the folder cannot be created.
    """

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
        """Remove the folder and its content."""
        self._removal()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *raised: object) -> None:
        self.close()


def remove_orphans() -> list[Path]:
    """Remove and return the folders that this user's ended processes left in the temporary directory."""
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
    """Create a lock file in ``home`` atomically; returns its descriptor, -1 if the file system has no locks."""
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
    """Hold the lock of ``home``; yields -1 for a folder in use. Raises OSError if it is not such a folder.

    Links are not followed, and other users' folders are ignored.
    """
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fd = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            ours = all(os.fstat(descriptor).st_uid == os.geteuid() for descriptor in (folder, fd))
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
    """Remove a folder of this process; does nothing in a fork of its ``owner``."""
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
