"""Memory shared with the process at the other end of a channel, for tensors too large for a socket.

A *region* is an anonymous file (memfd) that both processes map.  One side owns it and writes; the
other reads, and gives it back when done.  ``RegionPool`` is the owner's side, ``RegionMap`` the
reader's; both exist once per channel in either process (standard library only, any environment).
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

from conch.errors import ConchError, internal
from conch.tensors import Loan
from conch.workers.child.frames import Header
from conch.workers.child.lending import LentFile

#: Bytes of free regions that a pool keeps mapped for reuse.
IDLE_LIMIT = 64 << 20

_GRANULE = 64 << 10


class Region:
    """A mapped region; ``fd`` stays open for as long as the owner keeps it."""

    __slots__ = ("fd", "id", "map", "size")

    def __init__(self, id: int, size: int, fd: int) -> None:
        self.id = id
        self.size = size
        self.fd = fd
        self.map = mmap.mmap(fd, size)

    @property
    def announcement(self) -> Header:
        """The header of the frame that goes with the descriptor."""
        return {"op": "region", "region": self.id, "size": self.size}

    def close(self) -> None:
        """Unmap and close; views that are still around keep the mapping alive until they go."""
        os.close(self.fd)
        try:
            self.map.close()
        except BufferError:
            pass


class OfferedFile:
    """A file of somebody else's that the reader of a channel may use; ``fd`` is this object's own."""

    __slots__ = ("fd", "id")

    def __init__(self, id: int, fd: int) -> None:
        self.id = id
        self.fd = os.dup(fd)

    @property
    def announcement(self) -> Header:
        """The header of the frame that goes with the descriptor."""
        return {"op": "file", "region": self.id}

    def close(self) -> None:
        os.close(self.fd)


class RegionPool:
    """Regions that this process owns; safe to use from any thread.

    A region is taken for one frame, is *lent* until the reader gives it back, and is then *free*:
    kept for the next frame, the oldest ones dropped beyond ``idle_limit`` bytes, and all of them by :meth:`trim`.
    Files that it lends have ids as regions have, until their owners are gone.
    """

    def __init__(self, idle_limit: int = IDLE_LIMIT) -> None:
        self.idle_limit = idle_limit
        self.lent: dict[int, Region] = {}
        self.free: dict[int, Region] = {}
        #: Whether the reader is behind: there are regions to announce or to have unmapped.
        self.has_changes = False
        #: Called when the reader is to close a file, in any thread.
        self.on_loan_ended: Callable[[], None] = _nothing
        self._created: list[Region | OfferedFile] = []
        self._files: dict[int, OfferedFile] = {}
        self._loans: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._dropped: list[int] = []
        self._idle = 0
        self._last = 0
        # Re-entrant, since the garbage collector may come back here through Channel.release_region.
        self._lock = threading.RLock()

    @property
    def size(self) -> int:
        """Bytes of all regions."""
        with self._lock:
            return self._idle + sum(region.size for region in self.lent.values())

    def take(self, size: int) -> Region:
        """Lend a region of at least ``size`` bytes; its old contents are anything."""
        size = _rounded(size)
        with self._lock:
            fitting = [region for region in self.free.values() if size <= region.size <= 4 * size]
            if fitting:
                region = min(fitting, key=lambda region: region.size)
                del self.free[region.id]
                self._idle -= region.size
            else:
                self._last += 1
                region = _create(self._last, size)
                self._created.append(region)
                self.has_changes = True
            self.lent[region.id] = region
            return region

    def release(self, ids: Iterable[int]) -> None:
        """The reader gave these back; INTERNAL for one that it does not have."""
        with self._lock:
            for id in ids:
                region = self.lent.pop(id, None)
                if region is None:
                    raise internal(f"memory region {id} was released but is not lent")
                self.free[id] = region
                self._idle += region.size
            self._drop_beyond(self.idle_limit)

    def lend(self, loan: Loan) -> int:
        """Let the reader have a file for as long as its owner is there; returns its id."""
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
            if file in self._created:  # nobody has been told of it
                self._created.remove(file)
            else:
                self._dropped.append(id)
                self.has_changes = True
        self.on_loan_ended()

    def trim(self) -> None:
        """Drop all that is free: there have been no large tensors for a while."""
        with self._lock:
            self._drop_beyond(0)

    def _drop_beyond(self, limit: int) -> None:
        while self._idle > limit:
            region = self.free.pop(next(iter(self.free)))
            self._idle -= region.size
            region.close()
            self._dropped.append(region.id)
            self.has_changes = True

    def take_changes(self) -> tuple[list[Region | OfferedFile], list[int]]:
        """Return, once, new regions and files and the ids of those dropped, where the reader has not been told yet."""
        with self._lock:
            created, self._created = self._created, []
            dropped, self._dropped = self._dropped, []
            self.has_changes = False
            return created, dropped

    def close(self) -> None:
        """Give all memory back (the channel has ended)."""
        with self._lock:
            for region in (*self.lent.values(), *self.free.values()):
                region.close()
            for file in self._files.values():
                file.close()
            self.lent.clear()
            self.free.clear()
            self._files.clear()
            self._loans.clear()
            self._created.clear()
            self._idle = 0
            self.has_changes = False


class RegionMap:
    """Regions of the other process that this one has mapped, and ``files`` that it has lent, by id."""

    def __init__(self) -> None:
        self._regions: dict[int, mmap.mmap] = {}
        self.files: dict[int, LentFile] = {}
        #: Ids that this side has done with; the next frame out carries them.  Appending is safe
        #: from any thread and from the garbage collector.
        self.returned: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def size(self) -> int:
        """Bytes of all regions."""
        return sum(map(len, self._regions.values()))

    def add(self, id: int, size: int, fd: int) -> None:
        """Map a region that the owner announced; ``fd`` is closed in any case."""
        try:
            if size <= 0 or os.fstat(fd).st_size < size:
                raise internal(f"memory region {id} is smaller than the {size} bytes announced")
            self._regions[id] = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def add_file(self, id: int, fd: int) -> None:
        """Keep a file that the owner has lent."""
        self.files[id] = LentFile(fd)

    def get(self, id: int) -> mmap.mmap:
        """The mapping of a region; its length is the size announced.  Raises INTERNAL for an unknown one."""
        try:
            return self._regions[id]
        except (KeyError, TypeError):
            raise _unknown(id) from None

    def forget(self, id: int) -> None:
        """Unmap a region; arrays that still look into it keep it until they go.  Close a file."""
        file = self.files.pop(id, None)
        if file is not None:
            file.close()
        elif self._regions.pop(id, None) is None:
            raise _unknown(id)

    def close(self) -> None:
        self._regions.clear()
        for file in self.files.values():
            file.close()
        self.files.clear()


def _nothing() -> None:
    """Take the place of a callback that nobody needs."""


def _unknown(id: object) -> ConchError:
    return internal(f"memory region {id} is unknown")


def _rounded(size: int) -> int:
    """``size`` up to a multiple of an eighth of itself, so that similar sizes share regions."""
    granule = max(_GRANULE, 1 << max(0, size.bit_length() - 4))
    return -(-size // granule) * granule


def _create(id: int, size: int) -> Region:
    fd = anonymous_file()
    try:
        os.ftruncate(fd, size)
        return Region(id, size, fd)
    except BaseException:
        os.close(fd)
        raise


def anonymous_file() -> int:
    """The descriptor of an empty file in memory, which is gone when nobody has it open or mapped."""
    try:
        return os.memfd_create("conch", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # not Linux, or a sandbox forbids it
        fd, path = tempfile.mkstemp(prefix="conch-")
        os.unlink(path)
        return fd
