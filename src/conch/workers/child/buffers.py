"""Memory shared with the process at the other end of a channel, for tensors too large for a socket.

A *channel buffer* is an anonymous file (memfd) that both processes map. One side owns and writes it; the other reads it
and then releases it. ``BufferPool`` is the owner's side, ``BufferMap`` the reader's side; each process has one of each
per channel.

The server also lends a worker the files of clients' shared memory regions, to read inputs and write outputs there.
These files are never mapped: a client may truncate them at any time, and access to a mapping beyond the end of its file
kills the process (SIGBUS). Used at both ends of a channel, in any environment (standard library only).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Callable

from conch.core.errors import ConchError, internal
from conch.core.tensors import Buffer, Loan
from conch.workers.child.frames import Header

#: Size of free buffers that a pool keeps mapped for reuse (bytes).
IDLE_LIMIT = 64 << 20

_GRANULE = 64 << 10


class ChannelBuffer:
    """A mapped buffer; ``fd`` stays open while the owner keeps the buffer."""

    __slots__ = ("fd", "id", "map", "size")

    def __init__(self, id: int, size: int, fd: int) -> None:
        self.id = id
        self.size = size
        self.fd = fd
        self.map = mmap.mmap(fd, size)

    @property
    def announcement(self) -> Header:
        """The header of the frame that goes with the descriptor."""
        return {"op": "buffer", "buffer": self.id, "size": self.size}

    def close(self) -> None:
        """Close the descriptor and unmap; existing views keep the mapping alive until they are freed."""
        os.close(self.fd)
        try:
            self.map.close()
        except BufferError:
            pass


class OfferedFile:
    """A client's file that the reader of a channel may use; this object owns ``fd``, a duplicate."""

    __slots__ = ("fd", "id")

    def __init__(self, id: int, fd: int) -> None:
        self.id = id
        self.fd = os.dup(fd)

    @property
    def announcement(self) -> Header:
        """The header of the frame that goes with the descriptor."""
        return {"op": "file", "buffer": self.id}

    def close(self) -> None:
        os.close(self.fd)


class BufferPool:
    """Buffers that this process owns; thread-safe.

    A buffer is taken for one frame, is *lent* until the reader releases it, and is then *free* for the next frame. The
    oldest free buffers above ``idle_limit`` bytes are dropped, and :meth:`trim` drops all of them. Lent files have ids
    like buffers; a loan ends when its owner is freed.
    """

    def __init__(self, idle_limit: int = IDLE_LIMIT) -> None:
        self.idle_limit = idle_limit
        self.lent: dict[int, ChannelBuffer] = {}
        self.free: dict[int, ChannelBuffer] = {}
        #: Whether there are new or dropped buffers that have not been announced to the reader.
        self.has_changes = False
        #: Called in any thread when a loan has ended and the reader must close its file.
        self.on_loan_ended: Callable[[], None] = lambda: None
        self._created: list[ChannelBuffer | OfferedFile] = []
        self._files: dict[int, OfferedFile] = {}
        self._loans: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._dropped: list[int] = []
        self._idle = 0
        self._last = 0
        # Re-entrant, because the garbage collector may re-enter through Channel.release_buffer.
        self._lock = threading.RLock()

    @property
    def size(self) -> int:
        """Bytes of all buffers."""
        with self._lock:
            return self._idle + sum(buffer.size for buffer in self.lent.values())

    def take(self, size: int) -> ChannelBuffer:
        """Lend a buffer of at least ``size`` bytes with undefined contents."""
        size = _rounded(size)
        with self._lock:
            fitting = [buffer for buffer in self.free.values() if size <= buffer.size <= 4 * size]
            if fitting:
                buffer = min(fitting, key=lambda buffer: buffer.size)
                del self.free[buffer.id]
                self._idle -= buffer.size
            else:
                self._last += 1
                buffer = _create(self._last, size)
                self._created.append(buffer)
                self.has_changes = True
            self.lent[buffer.id] = buffer
            return buffer

    def release(self, ids: Iterable[int]) -> None:
        """Take back buffers that the reader has released. Raises INTERNAL for a buffer that is not lent."""
        with self._lock:
            for id in ids:
                buffer = self.lent.pop(id, None)
                if buffer is None:
                    raise internal(f"channel buffer {id} was released but is not lent")
                self.free[id] = buffer
                self._idle += buffer.size
            self._drop_beyond(self.idle_limit)

    def lend(self, loan: Loan) -> int:
        """Lend a file until its owner is freed; return its id."""
        with self._lock:
            id = self._loans.get(loan.owner)
            if id is None:
                self._last += 1
                id = self._loans[loan.owner] = self._last
                file = self._files[id] = OfferedFile(id, loan.fd)
                self._created.append(file)
                self.has_changes = True
                weakref.finalize(loan.owner, self._end_loan, id).atexit = False
            return id

    def _end_loan(self, id: int) -> None:
        with self._lock:
            file = self._files.pop(id, None)
            if file is None:  # the channel has ended
                return
            file.close()
            if file in self._created:  # not announced yet
                self._created.remove(file)
            else:
                self._dropped.append(id)
                self.has_changes = True
        self.on_loan_ended()

    def trim(self) -> None:
        """Drop all free buffers, after a time without large tensors."""
        with self._lock:
            self._drop_beyond(0)

    def _drop_beyond(self, limit: int) -> None:
        while self._idle > limit:
            buffer = self.free.pop(next(iter(self.free)))
            self._idle -= buffer.size
            buffer.close()
            self._dropped.append(buffer.id)
            self.has_changes = True

    def take_changes(self) -> tuple[list[ChannelBuffer | OfferedFile], list[int]]:
        """Return new buffers and files, and the ids of dropped ones, that have not been announced to the reader."""
        with self._lock:
            created, self._created = self._created, []
            dropped, self._dropped = self._dropped, []
            self.has_changes = False
            return created, dropped

    def close(self) -> None:
        """Release all memory, because the channel has ended."""
        with self._lock:
            for buffer in (*self.lent.values(), *self.free.values()):
                buffer.close()
            for file in self._files.values():
                file.close()
            self.lent.clear()
            self.free.clear()
            self._files.clear()
            self._loans.clear()
            self._created.clear()
            self._idle = 0
            self.has_changes = False


class BufferMap:
    """Mapped buffers of the other process, and the ``files`` that it has lent, by id."""

    def __init__(self) -> None:
        self._buffers: dict[int, mmap.mmap] = {}
        self.files: dict[int, LentFile] = {}
        #: Ids of buffers to release with the next outgoing frame. Any thread, and the garbage collector, may append.
        self.returned: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def size(self) -> int:
        """Bytes of all buffers."""
        return sum(map(len, self._buffers.values()))

    def add(self, id: int, size: int, fd: int) -> None:
        """Map an announced buffer; closes ``fd`` in any case. Raises INTERNAL if it is too small."""
        try:
            if size <= 0 or os.fstat(fd).st_size < size:
                raise internal(f"channel buffer {id} is smaller than the {size} bytes announced")
            self._buffers[id] = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def add_file(self, id: int, fd: int) -> None:
        """Keep a file that the owner has lent."""
        self.files[id] = LentFile(fd)

    def get(self, id: int) -> mmap.mmap:
        """Return the mapping of a buffer, with its announced size. Raises INTERNAL for an unknown id."""
        try:
            return self._buffers[id]
        except (KeyError, TypeError):
            raise _unknown(id) from None

    def forget(self, id: int) -> None:
        """Close a file or unmap a buffer; arrays that use a buffer keep it mapped until they are freed."""
        file = self.files.pop(id, None)
        if file is not None:
            file.close()
        elif self._buffers.pop(id, None) is None:
            raise _unknown(id)

    def close(self) -> None:
        self._buffers.clear()
        for file in self.files.values():
            file.close()
        self.files.clear()


def _unknown(id: object) -> ConchError:
    return internal(f"channel buffer {id} is unknown")


def _rounded(size: int) -> int:
    """Round ``size`` up by less than an eighth (or to 64 KiB), so that tensors of similar size can reuse a buffer."""
    granule = max(_GRANULE, 1 << max(0, size.bit_length() - 4))
    return -(-size // granule) * granule


def _create(id: int, size: int) -> ChannelBuffer:
    fd = anonymous_file()
    try:
        os.ftruncate(fd, size)
        return ChannelBuffer(id, size, fd)
    except BaseException:
        os.close(fd)
        raise


def anonymous_file() -> int:
    """Return the descriptor of an empty anonymous file, freed when no process has it open or mapped."""
    try:
        return os.memfd_create("conch", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # not Linux, or a sandbox forbids it
        fd, path = tempfile.mkstemp(prefix="conch-")
        os.unlink(path)
        return fd


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
        # Negative, because the ids of the worker's own buffers are positive.
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
