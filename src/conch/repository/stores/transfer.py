"""Copies the files of a model out of a store: concurrently, with retries, and verified."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from time import monotonic
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

    ``pool`` limits the concurrent downloads of all models; ``what`` describes the files in the log.
    """

    def __init__(
        self,
        store: Store,
        pool: DaemonPool,
        below: str,
        what: str,
        files: Sequence[RemoteFile],
        folder: Path,
        pauses: Sequence[float] = PAUSES,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._store = store
        self._pool = pool
        self._below = below
        self._what = what
        self._files = files
        self._folder = folder
        self._pauses = pauses
        self._clock = clock
        self._lock = threading.Lock()
        self._total = sum(file.size for file in files)
        self._arrived = 0
        self._begun = self._told = clock()
        self._given_up = threading.Event()

    def run(self) -> None:
        """Copy all files; raises the error of the first that fails. Blocks."""
        count = len(self._files)
        LOG.info("downloading %s: %d file%s, %s", self._what, count, "s" * (count != 1), in_units(self._total))
        futures = [self._pool.submit(lambda file=file: self.fetch(file)) for file in self._files]  # type: ignore[misc]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
        finally:
            self._given_up.set()
            wait(futures)  # no thread may still write to the folder
        took = max(self._clock() - self._begun, 1e-3)
        LOG.info("downloaded %s: took %.1f s, %s/s", self._what, took, in_units(self._total / took))

    def fetch(self, file: RemoteFile) -> Path:
        """Copy one file and return its path; raises if it cannot be copied."""
        remote = replace(file, path=f"{self._below}/{file.path}")
        target = self._folder / file.path
        part = target.with_name(f".{token_hex(8)}.part")  # does not clash with a file in the store
        for attempt in range(len(self._pauses) + 1):
            arrived = _Arrival(self._count)
            try:
                self._check_wanted()
                target.parent.mkdir(parents=True, exist_ok=True)
                self._store.fetch(remote, part, arrived)
                self._verify(remote, part)
                _set_time(part, file)
                part.rename(target)
                arrived.correct(file.size)
                return target
            except Exception as error:
                arrived.correct(0)
                part.unlink(missing_ok=True)
                problem = self._explained(file, error)
                if problem.code is not Code.UNAVAILABLE or self._given_up.is_set() or attempt == len(self._pauses):
                    raise problem from error
                LOG.warning("%s; it is tried again", problem.message)
            if self._pool.closed.wait(self._pauses[attempt]):
                self._check_wanted()
        raise AssertionError("unreachable")

    def _explained(self, file: RemoteFile, error: Exception) -> ConchError:
        if isinstance(error, OSError) and error.filename is not None and self._is_ours(error):
            return internal(f"{file.path} cannot be written to {self._folder}: {error.strerror}")
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return internal(f"{file.path} cannot be written to {self._folder}: {os.strerror(error.errno)}")
        problem = self._store.explain(error)
        return ConchError(f"{file.path} cannot be downloaded: {problem.message}", problem.code)

    def _is_ours(self, error: OSError) -> bool:
        return str(error.filename).startswith(str(self._folder))

    def _check_wanted(self) -> None:
        if self._given_up.is_set() or self._pool.closed.is_set():
            raise unavailable(f"the download of {self._what} was cancelled")

    def _verify(self, file: RemoteFile, part: Path) -> None:
        """Check a copy against the listing and flush it to disk. Raises UNAVAILABLE if it differs."""
        size = part.stat().st_size
        if size != file.size:
            raise unavailable(f"{file.path} has arrived with {size} bytes instead of {file.size}")
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
            algorithm, _, wanted = file.digest.partition(":")
            if wanted and _digest(stream, algorithm, size) != wanted and self._store.digest_holds(file):
                raise unavailable(f"{file.path} differs from the store: its {algorithm} is different")

    def _count(self, amount: int) -> None:
        """Add ``amount`` (may be negative) to the bytes received, and log progress from time to time."""
        self._check_wanted()
        with self._lock:
            self._arrived += amount
            now = self._clock()
            if now - self._told < _PROGRESS_SECONDS or not self._total:
                return
            self._told = now
            share, arrived = 100 * self._arrived // self._total, in_units(self._arrived)
        LOG.info("downloading %s: %d %%, %s of %s", self._what, share, arrived, in_units(self._total))


class _Arrival:
    """Counts the received bytes of one file."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._bytes = 0

    def __call__(self, amount: int) -> None:
        self._bytes += amount
        self._tell(amount)

    def correct(self, amount: int) -> None:
        """Set the count to ``amount``, regardless of earlier reports."""
        missing, self._bytes = amount - self._bytes, amount
        try:
            self._tell(missing)
        except ConchError:
            pass  # aborted; the caller checks for it


def _set_time(path: Path, file: RemoteFile) -> None:
    if file.modified:
        os.utime(path, (file.modified, file.modified))


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
