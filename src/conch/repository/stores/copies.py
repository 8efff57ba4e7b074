"""Copies of one model in the cache.  A copy is complete or not there, and nothing in it changes afterwards.

    <model>/lock                   held by whoever makes a copy, so that two servers do not download the same twice
    <model>/new/                   the copy that is being made
    <model>/<n>/copy.json          what was copied; locked by every process that uses the copy
    <model>/<n>/<model>/           the model's directory

The copy with the highest number is kept for the next start; others are removed when nobody uses them any more.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import Any, Final

from conch.errors import unavailable
from conch.repository.stores.store import RemoteFile

try:
    import fcntl
except ImportError:  # not on this system: copies are never removed
    fcntl = None  # type: ignore[assignment]

LOG = logging.getLogger("conch")

_RECORD: Final = "copy.json"
_LOCK: Final = "lock"
_NEW: Final = "new"
#: How often the lock of another process is tried (s).
_PATIENCE: Final = 0.2


class Copy:
    """A complete copy; ``directory`` is the model's.  It is in use as long as something refers to this object."""

    def __init__(self, home: Path, record: Mapping[str, Any], lock: int) -> None:
        self.directory = home / home.parent.name
        self.files: Mapping[str, Any] = record["files"]
        self.finalizer = weakref.finalize(self, _release, home, lock, os.getpid())
        self.finalizer.atexit = False  # the system takes the lock; the next start removes what is not needed

    def file(self, remote: RemoteFile) -> Path | None:
        """Where the copy has ``remote`` with the same content, if it has and nobody has changed it."""
        recorded = self.files.get(remote.path)
        if recorded is None or recorded[:2] != [remote.size, remote.identity]:
            return None
        path = self.directory / remote.path
        try:
            status = path.stat(follow_symlinks=False)
        except OSError:
            return None
        return path if [status.st_size, status.st_mtime_ns] == [remote.size, recorded[2]] else None

    def has_just(self, files: Collection[RemoteFile], directories: Iterable[str]) -> bool:
        """Whether it is a copy of ``files`` and of nothing else, as it was made."""
        if len(self.files) != len(files) or not all((self.directory / directory).is_dir() for directory in directories):
            return False
        return all(self.file(file) is not None for file in files)


class ModelCopies:
    """The copies of the model whose folder in the cache is ``folder``; ``closed`` ends waiting for other processes."""

    def __init__(self, folder: Path, closed: threading.Event) -> None:
        self.folder = folder
        self._closed = closed

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only one that makes or removes copies; waits for others.  Raises OSError for an unusable cache,
        UNAVAILABLE where the server stops meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self.folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            told = False
            while not _lock(fd, exclusive=True):
                if not told:
                    LOG.info("waiting for another load that makes a copy of '%s'", self.folder.name)
                    told = True
                if self._closed.wait(_PATIENCE):
                    raise unavailable("the server is stopping and reads no model repository")
            yield
        finally:
            os.close(fd)

    def scratch(self) -> Path:
        """An empty folder, which is there until a copy is made.  Call while locked."""
        new = self.folder / _NEW
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        return new

    def usable(self) -> Iterator[Copy]:
        """The complete copies, the newest first, which stay as long as they are referred to.  Call while locked."""
        for home in sorted(_homes(self.folder), key=lambda one: -int(one.name)):
            copy = _open(home)
            if copy is not None:
                yield copy

    def make(self, files: Collection[RemoteFile], directories: Iterable[str], fill: Callable[[Path], None]) -> Copy:
        """The copy of ``files``, which ``fill`` puts into an empty directory; what it raises leaves nothing behind.

        Call while locked.
        """
        new = self.scratch()
        directory = new / self.folder.name
        directory.mkdir()
        try:
            for one in directories:
                (directory / one).mkdir(parents=True, exist_ok=True)
            fill(directory)
            stamps = {
                file.path: [file.size, file.identity, (directory / file.path).stat().st_mtime_ns] for file in files
            }
            (new / _RECORD).write_text(json.dumps({"files": stamps}), encoding="utf-8")
            home = self.folder / str(max((int(one.name) for one in _homes(self.folder)), default=0) + 1)
            new.rename(home)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        copy = _open(home)
        if copy is None:
            raise OSError(f"the copy in {home} has gone")
        return copy

    def discard(self, copy: Copy) -> None:
        """Remove a copy that was made of files that changed meanwhile.  Call while locked."""
        home = copy.directory.parent
        (home / _RECORD).unlink(missing_ok=True)
        shutil.rmtree(home, ignore_errors=True)

    def prefer(self, copy: Copy) -> None:
        """Make ``copy`` the one that is kept, and remove those that nobody uses.  Call while locked."""
        kept = copy.directory.parent
        for home in _homes(self.folder):
            if home != kept:
                _remove_unused(home)


def tidy(folder: Path, *, gone: bool) -> None:
    """Remove what a process that was killed has left of a copy; with ``gone`` also all copies that nobody uses."""
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if fcntl is not None and _lock(fd, exclusive=True):
            shutil.rmtree(folder / _NEW, ignore_errors=True)
            for home in _homes(folder) if gone else []:
                _remove_unused(home)
    finally:
        os.close(fd)


def _homes(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.isdecimal()]


def _open(home: Path) -> Copy | None:
    """The copy in ``home``, which nobody removes from now on; None for one that is not complete."""
    try:
        lock = os.open(home / _RECORD, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        record = json.loads((home / _RECORD).read_bytes())
        if isinstance(record, dict) and isinstance(record.get("files"), dict) and _lock(lock, exclusive=False):
            return Copy(home, record, lock)
    except (OSError, ValueError):
        pass
    os.close(lock)
    return None


def _lock(fd: int, *, exclusive: bool) -> bool:
    """Take a lock; True as well where the file system has none, which is for one server alone."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _remove_unused(home: Path) -> bool:
    """Remove a copy that nobody uses; False for one that somebody does."""
    try:
        fd = os.open(home / _RECORD, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        shutil.rmtree(home, ignore_errors=True)
        return True
    except OSError:
        return False
    try:
        if fcntl is None:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (home / _RECORD).unlink()  # it is no copy from here on, wherever the removal is interrupted
        shutil.rmtree(home, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _release(home: Path, lock: int, owner: int) -> None:
    """Let a copy go; one that a newer one has replaced is removed, which takes too long for whoever calls this."""
    os.close(lock)
    if os.getpid() != owner or not _is_replaced(home):
        return
    with suppress(RuntimeError):  # the interpreter is ending
        threading.Thread(target=_remove_if_replaced, args=(home,), name="old-copy", daemon=True).start()


def _is_replaced(home: Path) -> bool:
    """Whether there is a newer copy, which is the one to keep."""
    try:
        return any(int(one.name) > int(home.name) for one in _homes(home.parent))
    except OSError:
        return False


def _remove_if_replaced(home: Path) -> None:
    with suppress(OSError):
        fd = os.open(home.parent / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            while not _lock(fd, exclusive=True):
                sleep(_PATIENCE)
            if _is_replaced(home):
                _remove_unused(home)
        finally:
            os.close(fd)
