"""Files of clients' shared memory regions, lent by the server to a worker, which reads inputs and writes outputs there.

The files are never mapped: a client may truncate them at any time, and access to a mapping beyond the end of its file
kills the process (SIGBUS). Used at both ends of a channel, in any environment (standard library only).
"""

from __future__ import annotations

import os

from conch.core.tensors import Buffer


class LentFile:
    """A file lent by the other process; this object owns ``fd``."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` from ``offset``, with zeros if the file is too short; the server detects that too."""
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
        """Write an output and return the end of its descriptor; None if the server must handle the output instead."""
        if len(data) > self._size:
            return None
        try:
            written = write_at(self._file.fd, data, self._offset)
        except OSError:
            return None
        # Negative, because the ids of the worker's own regions are positive.
        return (-self._id, self._offset) if written else None


def read_at(fd: int, target: memoryview, at: int) -> bool:
    """Fill ``target`` with the data at position ``at``; return False if the file is too short. Raises OSError."""
    while target:
        read = os.preadv(fd, [target], at)
        if not read:
            return False
        target, at = target[read:], at + read
    return True


def write_at(fd: int, data: Buffer, at: int) -> bool:
    """Write ``data`` at position ``at``; return False if that would extend the file. Raises OSError."""
    if at + len(data) > os.fstat(fd).st_size:
        return False
    left = memoryview(data)
    while left:
        written = os.pwrite(fd, left, at)
        left, at = left[written:], at + written
    return True
