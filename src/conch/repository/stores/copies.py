"""Copies of one model in the cache. A copy is visible only when it is complete, and never changes afterwards.

    <model>/lock                   held while a copy is made, so that two servers do not download the same model
    <model>/new/                   the copy in progress
    <model>/<n>/copy.json          the list of copied files; locked by every process that uses the copy
    <model>/<n>/<model>/           the model's directory

Files are downloaded concurrently, with retries, and verified. The copy with the highest number is kept for the next
start; others are removed when no process uses them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep
from typing import Any, Final

from conch.core.errors import Code, ConchError, internal, unavailable
from conch.repository.stores.pool import DaemonPool
from conch.repository.stores.store import RemoteFile, Store

LOG = logging.getLogger("conch")

#: The delay before each further attempt (s).
PAUSES: Final = (0.5, 1.0, 2.0)
#: The interval between progress log lines (s).
_PROGRESS_SECONDS: Final = 5.0
_BLOCK: Final = 1 << 20


class Transfer:
    """Copies ``files`` of one model, with paths relative to the directory ``below``, to ``folder``.

    ``pool`` limits the concurrent downloads of all models; ``description`` names the files in the log.
    """

    def __init__(
        self,
        store: Store,
        pool: DaemonPool,
        below: str,
        description: str,
        files: Sequence[RemoteFile],
        folder: Path,
        pauses: Sequence[float] = PAUSES,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._store = store
        self._pool = pool
        self._below = below
        self._description = description
        self._files = files
        self._folder = folder
        self._pauses = pauses
        self._clock = clock
        self._lock = threading.Lock()
        self._total = sum(file.size for file in files)
        self._arrived = 0
        self._started_at = self._logged_at = clock()
        self._given_up = threading.Event()

    def run(self) -> None:
        """Copy all files; raises the error of the first that fails. Blocks."""
        count = len(self._files)
        LOG.info("downloading %s: %d file%s, %s", self._description, count, "s" * (count != 1), in_units(self._total))
        futures = [self._pool.submit(lambda file=file: self.fetch(file)) for file in self._files]  # type: ignore[misc]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
        finally:
            self._given_up.set()
            wait(futures)  # no thread may still write to the folder
        took = max(self._clock() - self._started_at, 1e-3)
        LOG.info("downloaded %s: took %.1f s, %s/s", self._description, took, in_units(self._total / took))

    def fetch(self, file: RemoteFile) -> Path:
        """Copy one file and return its path; raises if it cannot be copied."""
        remote = replace(file, path=f"{self._below}/{file.path}")
        target = self._folder / file.path
        part = target.with_name(f".{token_hex(8)}.part")  # does not clash with a file in the store
        for attempt in range(len(self._pauses) + 1):
            arrived = _Arrival(self._count)
            try:
                self._check_cancelled()
                target.parent.mkdir(parents=True, exist_ok=True)
                self._store.fetch(remote, part, arrived)
                self._verify(remote, part)
                if file.modified:
                    os.utime(part, (file.modified, file.modified))
                part.rename(target)
                arrived.correct(file.size)
                return target
            except Exception as error:
                arrived.correct(0)
                part.unlink(missing_ok=True)
                problem = self._explained(file, error)
                if problem.code is not Code.UNAVAILABLE or self._given_up.is_set() or attempt == len(self._pauses):
                    raise problem from error
                LOG.warning("%s; retrying", problem.message)
            if self._pool.closed.wait(self._pauses[attempt]):
                self._check_cancelled()
        raise AssertionError("unreachable")

    def _explained(self, file: RemoteFile, error: Exception) -> ConchError:
        if isinstance(error, OSError) and str(error.filename).startswith(str(self._folder)):
            return internal(f"{file.path} cannot be written to {self._folder}: {error.strerror}")
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return internal(f"{file.path} cannot be written to {self._folder}: {os.strerror(error.errno)}")
        problem = self._store.explain(error)
        return ConchError(f"{file.path} cannot be downloaded: {problem.message}", problem.code)

    def _check_cancelled(self) -> None:
        if self._given_up.is_set() or self._pool.closed.is_set():
            raise unavailable(f"the download of {self._description} was cancelled")

    def _verify(self, file: RemoteFile, part: Path) -> None:
        """Check a copy against the listing and flush it to disk. Raises UNAVAILABLE if it differs."""
        size = part.stat().st_size
        if size != file.size:
            raise unavailable(f"{file.path} has arrived with {size} bytes instead of {file.size}")
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
            algorithm, _, digest = file.digest.partition(":")
            if digest and _digest(stream, algorithm, size) != digest and self._store.digest_holds(file):
                raise unavailable(f"{file.path} differs from the store: its {algorithm} is different")

    def _count(self, amount: int) -> None:
        """Add ``amount`` (may be negative) to the bytes received, and log progress from time to time."""
        self._check_cancelled()
        with self._lock:
            self._arrived += amount
            now = self._clock()
            if now - self._logged_at < _PROGRESS_SECONDS or not self._total:
                return
            self._logged_at = now
            share, arrived = 100 * self._arrived // self._total, in_units(self._arrived)
        LOG.info("downloading %s: %d %%, %s of %s", self._description, share, arrived, in_units(self._total))


class _Arrival:
    """Counts the received bytes of one file."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report
        self._bytes = 0

    def __call__(self, amount: int) -> None:
        self._bytes += amount
        self._report(amount)

    def correct(self, amount: int) -> None:
        """Set the count to ``amount``, regardless of earlier reports."""
        missing, self._bytes = amount - self._bytes, amount
        try:
            self._report(missing)
        except ConchError:
            pass  # aborted; the caller checks for it


def _digest(stream: Any, algorithm: str, size: int) -> str:
    """Return the hexadecimal digest of a file; ``git`` is the digest of a Git blob."""
    digest = hashlib.sha1(b"blob %d\0" % size) if algorithm == "git" else hashlib.new(algorithm, usedforsecurity=False)
    while block := stream.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def in_units(count: float) -> str:
    """Format a number of bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        text = f"{count:.0f}" if unit == "bytes" else f"{count:.1f}"
        if float(text) < 1000:
            return f"{text} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


_RECORD: Final = "copy.json"
_LOCK: Final = "lock"
_NEW: Final = "new"
#: The interval between attempts to lock (s).
_POLL_INTERVAL: Final = 0.2


class Copy:
    """A complete copy; ``directory`` is the model's directory. The copy is in use while this object is referenced."""

    def __init__(self, home: Path, record: Mapping[str, Any], lock: int) -> None:
        self.directory = home / home.parent.name
        self.files: Mapping[str, Any] = record["files"]
        self.finalizer = weakref.finalize(self, _release, home, lock, os.getpid())
        self.finalizer.atexit = False  # the system releases the lock; the next start removes unneeded copies

    def file(self, remote: RemoteFile) -> Path | None:
        """Return the path of ``remote`` in the copy; None if it is missing, differs, or was changed locally."""
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
        """Return whether the copy contains exactly ``files`` and the directories, unchanged since it was made."""
        if len(self.files) != len(files) or not all((self.directory / directory).is_dir() for directory in directories):
            return False
        return all(self.file(file) is not None for file in files)


class ModelCopies:
    """The copies of a model in its cache ``folder``; ``closed`` ends waiting for other processes."""

    def __init__(self, folder: Path, closed: threading.Event) -> None:
        self.folder = folder
        self._closed = closed

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the exclusive right to make or remove copies in a context; waits for other holders.

        Raises OSError for an unusable cache, and UNAVAILABLE if the server stops during the wait.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self.folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            logged = False
            while not _lock(fd, exclusive=True):
                if not logged:
                    LOG.info("waiting for another load that makes a copy of '%s'", self.folder.name)
                    logged = True
                if self._closed.wait(_POLL_INTERVAL):
                    raise unavailable("the server is stopping and no longer reads model repositories")
            yield
        finally:
            os.close(fd)

    def scratch(self) -> Path:
        """Create an empty temporary folder, which exists until a copy is made. Call while locked."""
        new = self.folder / _NEW
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        return new

    def usable(self) -> Iterator[Copy]:
        """Yield the complete copies, newest first; each stays while it is referenced. Call while locked."""
        for home in sorted(_homes(self.folder), key=lambda home: -int(home.name)):
            copy = _open(home)
            if copy is not None:
                yield copy

    def make(self, files: Collection[RemoteFile], directories: Iterable[str], fill: Callable[[Path], None]) -> Copy:
        """Make a copy of ``files``; ``fill`` writes them to an empty directory. Call while locked.

        If ``fill`` raises, the unfinished copy is removed.
        """
        new = self.scratch()
        directory = new / self.folder.name
        directory.mkdir()
        try:
            for subdirectory in directories:
                (directory / subdirectory).mkdir(parents=True, exist_ok=True)
            fill(directory)
            stamps = {
                file.path: [file.size, file.identity, (directory / file.path).stat().st_mtime_ns] for file in files
            }
            (new / _RECORD).write_text(json.dumps({"files": stamps}), encoding="utf-8")
            home = self.folder / str(max((int(home.name) for home in _homes(self.folder)), default=0) + 1)
            new.rename(home)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        copy = _open(home)
        if copy is None:
            raise OSError(f"the copy in {home} has been removed")
        return copy

    def discard(self, copy: Copy) -> None:
        """Remove a copy of files that changed while they were copied. Call while locked."""
        home = copy.directory.parent
        (home / _RECORD).unlink(missing_ok=True)
        shutil.rmtree(home, ignore_errors=True)

    def prefer(self, copy: Copy) -> None:
        """Keep ``copy`` and remove unused other copies. Call while locked."""
        kept = copy.directory.parent
        for home in _homes(self.folder):
            if home != kept:
                _remove_unused(home)


def tidy(folder: Path, *, gone: bool) -> None:
    """Remove an incomplete copy that a killed process left; with ``gone``, remove all unused copies too."""
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if _lock(fd, exclusive=True):
            shutil.rmtree(folder / _NEW, ignore_errors=True)
            for home in _homes(folder) if gone else []:
                _remove_unused(home)
    finally:
        os.close(fd)


def _homes(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.isdecimal()]


def _open(home: Path) -> Copy | None:
    """Open the copy in ``home`` and protect it from removal; None for an incomplete copy."""
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
    """Take a lock without blocking.

    Returns True if the file system has no locks, where only one server may use the cache.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _remove_unused(home: Path) -> bool:
    """Remove a copy if it is unused; returns False if it is in use."""
    try:
        fd = os.open(home / _RECORD, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        shutil.rmtree(home, ignore_errors=True)
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (home / _RECORD).unlink()  # without a record it is no longer a copy, even if the removal is interrupted
        shutil.rmtree(home, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _release(home: Path, lock: int, owner: int) -> None:
    """Release a copy. A replaced copy is removed in a thread, because removing takes too long for the caller."""
    os.close(lock)
    if os.getpid() != owner or not _is_replaced(home):
        return
    with suppress(RuntimeError):  # the interpreter is ending
        threading.Thread(target=_remove_if_replaced, args=(home,), name="old-copy", daemon=True).start()


def _is_replaced(home: Path) -> bool:
    """Return whether a newer copy exists."""
    try:
        return any(int(newer.name) > int(home.name) for newer in _homes(home.parent))
    except OSError:
        return False


def _remove_if_replaced(home: Path) -> None:
    with suppress(OSError):
        fd = os.open(home.parent / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            while not _lock(fd, exclusive=True):
                sleep(_POLL_INTERVAL)
            if _is_replaced(home):
                _remove_unused(home)
        finally:
            os.close(fd)
