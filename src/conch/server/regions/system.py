"""A region of POSIX shared memory that a client has made: opened by its key, read and written through its file.

The file is never mapped: a client may shorten it at any time, and whoever touches a mapping beyond the end of its file
is killed.  ``pread`` tells that there is nothing.  Used on the event loop.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

from conch.errors import ConchError, internal, invalid
from conch.tensors import Buffer, Loan
from conch.workers.child.lending import read_at, write_at

#: Where Linux keeps shared memory that has a name.
SHARED_MEMORY: Final = Path("/dev/shm")
#: How the names of the shared memory of Triton's own processes begin.
_RESERVED: Final = "triton_python_backend_shm_region_"


class SystemRegion:
    """``size`` bytes at ``offset`` of the shared memory with the name ``key``.

    It stays open for as long as somebody holds this object, whatever the client does with the name.
    """

    def __init__(self, name: str, key: str, offset: int, size: int, folder: Path = SHARED_MEMORY) -> None:
        """Raises INTERNAL where there is no such memory, INVALID_ARG where the part is not within it, or reserved."""
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
            self._close()  # now: the error holds this object for as long as somebody looks at it
            raise

    def _check(self) -> None:
        """Raise unless this is a part of a client's own shared memory, as far as the file tells."""
        found = self.file
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:  # a link may lead to what is not the client's
            raise _not_opened(self.key)
        problem = ""
        if self.offset + self.size > found.st_size:
            problem = "invalid args"
        elif not self.size or self.offset % os.sysconf("SC_PAGE_SIZE"):
            problem = "unable to process address space" + os.strerror(errno.EINVAL)
        if problem:
            raise invalid(f"failed to register shared memory region '{self.name}': {problem}")

    @property
    def file(self) -> os.stat_result:
        """What the system says of the file."""
        return os.fstat(self._fd)

    @property
    def status(self) -> dict[str, str | int]:
        """What clients are told of the region."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.size}

    def read_into(self, offset: int, target: memoryview) -> None:
        """Copy what follows ``offset``, which is within the region, to ``target``.

        Raises INVALID_ARG where the client has taken it away, INTERNAL where it cannot be read.
        """
        try:
            whole = read_at(self._fd, target, self.offset + offset)
        except OSError as error:
            raise internal(f"shared memory region '{self.name}' cannot be read: {error.strerror}") from None
        if not whole:
            raise self._shortened()

    def write(self, offset: int, data: Buffer) -> None:
        """Put data into the region, within which it is; raises as :meth:`read_into`."""
        try:
            whole = write_at(self._fd, data, self.offset + offset)
        except OSError as error:
            raise internal(f"shared memory region '{self.name}' cannot be written: {error.strerror}") from None
        if not whole:
            raise self._shortened()

    def loan(self, offset: int, size: int) -> Loan:
        """A part for workers to read or write."""
        return Loan(self, self._fd, self.offset + offset, size)

    def require(self, end: int) -> None:
        """Raise INVALID_ARG where the client has taken away what is before ``end``."""
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
    """The descriptor of what ``shm_open`` opens, which takes no links and no folders; without waiting for anybody."""
    if not plain or "/" in plain:
        raise _not_opened(key)
    try:
        return os.open(folder / plain, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        raise _not_opened(key) from None


def _not_opened(key: str) -> ConchError:
    return internal(f"Unable to open shared memory region: '{key}'")
