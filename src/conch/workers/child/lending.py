"""Files of clients' shared memory, which the server lends to a worker: it reads inputs there and writes outputs.

A file is never mapped: a client may shorten it at any time, and whoever touches a mapping beyond the end of its file
is killed.  Used at both ends of a channel, in any environment (standard library only).
"""

from __future__ import annotations

import os

from conch.tensors import Buffer


class LentFile:
    """A file that the other process has lent; ``fd`` is this object's own."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read_into(self, target: memoryview, offset: int) -> None:
        """Copy a part to ``target``; zeros where the file has ended, which the server notices as well."""
        if not read_at(self.fd, target, offset):
            target[:] = bytes(len(target))

    def close(self) -> None:
        os.close(self.fd)


class OutputLoan:
    """A part of a lent file for one output of a request."""

    __slots__ = ("_file", "_id", "_offset", "_size")

    def __init__(self, file: LentFile, id: int, offset: int, size: int) -> None:
        self._file = file
        self._id = id
        self._offset = offset
        self._size = size

    def take(self, data: Buffer) -> tuple[int, int] | None:
        """Write an output; what completes its descriptor, or None where the server has to see to it."""
        if len(data) > self._size:
            return None
        try:
            written = write_at(self._file.fd, data, self._offset)
        except OSError:
            return None
        # No region of the worker's: those have positive numbers.
        return (-self._id, self._offset) if written else None


def read_at(fd: int, target: memoryview, at: int) -> bool:
    """Fill ``target`` with what follows position ``at``; False where the file has ended before.  Raises OSError."""
    while target:
        read = os.preadv(fd, [target], at)
        if not read:
            return False
        target, at = target[read:], at + read
    return True


def write_at(fd: int, data: Buffer, at: int) -> bool:
    """Put ``data`` at position ``at``, unless that would make the file longer: then False.  Raises OSError."""
    if at + len(data) > os.fstat(fd).st_size:
        return False
    left = memoryview(data)
    while left:
        written = os.pwrite(fd, left, at)
        left, at = left[written:], at + written
    return True
