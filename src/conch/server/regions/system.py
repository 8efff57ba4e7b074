"""A client's region of POSIX shared memory, opened by its key and accessed through its file.

The file is never mapped: a client may truncate it at any time, and an access to a mapping beyond the end of the file
kills the process. ``pread`` returns no data instead. Used on the event loop.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

from conch.core.errors import ConchError, internal, invalid
from conch.core.tensors import Buffer, Loan
from conch.workers.child.memory import read_at, write_at

#: The directory of named shared memory on Linux.
SHARED_MEMORY: Final = Path("/dev/shm")
#: Name prefix of the shared memory of Triton's own processes.
_RESERVED: Final = "triton_python_backend_shm_region_"


class SystemRegion:
    """``size`` bytes at ``offset`` of the shared memory ``key``.

    It stays open as long as this object exists, even if the client removes the name.
    """

    def __init__(self, name: str, key: str, offset: int, size: int, folder: Path = SHARED_MEMORY) -> None:
        """Open the memory.

        Raises INTERNAL if it does not exist, INVALID_ARG for a reserved key or a part outside of the memory.
        """
        self.name, self.key, self.offset, self.size = name, key, offset, size
        self._fd = -1
        plain = key.lstrip("/")
        if plain.startswith(_RESERVED):
            raise invalid(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved"
                f" prefix '{_RESERVED}'"
            )
        self._fd = _opened(folder, plain, key)
        try:
            self._check()
        except ConchError:
            self._close()  # at once: the error keeps this object alive as long as it is referenced
            raise

    def _check(self) -> None:
        """Raise unless the file can be a client's shared memory and contains the region."""
        file_stat = self.file
        # A hard link may be a file that is not the client's.
        if not stat.S_ISREG(file_stat.st_mode) or file_stat.st_nlink > 1:
            raise _not_opened(self.key)
        problem = ""
        if self.offset + self.size > file_stat.st_size:
            problem = "invalid args"
        elif not self.size or self.offset % os.sysconf("SC_PAGE_SIZE"):
            problem = "unable to process address space" + os.strerror(errno.EINVAL)
        if problem:
            raise invalid(f"failed to register shared memory region '{self.name}': {problem}")

    @property
    def file(self) -> os.stat_result:
        """The ``stat`` result of the file."""
        return os.fstat(self._fd)

    @property
    def status(self) -> dict[str, str | int]:
        """The status of the region for clients."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.size}

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``offset``, which must be in the region.

        Raises INVALID_ARG if the client has truncated the memory, INTERNAL if it cannot be read.
        """
        try:
            whole = read_at(self._fd, target, self.offset + offset)
        except OSError as error:
            raise internal(f"shared memory region '{self.name}' cannot be read: {error.strerror}") from None
        if not whole:
            raise self._shortened()

    def write(self, offset: int, data: Buffer) -> None:
        """Write data that fits into the region; raises as :meth:`read_into`."""
        try:
            whole = write_at(self._fd, data, self.offset + offset)
        except OSError as error:
            raise internal(f"shared memory region '{self.name}' cannot be written: {error.strerror}") from None
        if not whole:
            raise self._shortened()

    def loan(self, offset: int, size: int) -> Loan:
        """A part of the region that a worker can read or write directly."""
        return Loan(self, self._fd, self.offset + offset, size)

    def require(self, end: int) -> None:
        """Raise INVALID_ARG if the client has truncated the region to less than ``end`` bytes."""
        if self.offset + end > self.file.st_size:
            raise self._shortened()

    def _shortened(self) -> ConchError:
        return invalid(f"shared memory region '{self.name}' has become smaller than when it was registered")

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self._close()


def _opened(folder: Path, plain: str, key: str) -> int:
    """Open a file as ``shm_open`` does, without following links or blocking; returns its descriptor."""
    if not plain or "/" in plain:
        raise _not_opened(key)
    try:
        return os.open(folder / plain, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        raise _not_opened(key) from None


def _not_opened(key: str) -> ConchError:
    return internal(f"Unable to open shared memory region: '{key}'")
