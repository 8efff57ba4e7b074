"""The shared memory of a program's clients, for inputs and outputs of their requests."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Sequence

from conch.server.regions import SHARED_MEMORY

#: The size of the memory (bytes): whole pages.
SIZE = 1 << 16
_PLACE = struct.Struct("<3q")
_numbers = itertools.count()


class ClientMemory:
    """A file in the system's shared memory; ``key`` is its name for servers."""

    def __init__(self) -> None:
        self.key = f"/conch-simulation-{os.getpid()}-{next(_numbers)}"
        self._path = SHARED_MEMORY / self.key[1:]
        self._path.write_bytes(bytes(SIZE))
        self._used = 0

    def write_input(self, values: Sequence[int]) -> int:
        """Write an input and reserve space for its output after it; returns the input's offset."""
        offset, self._used = self._used, self._used + 2 * _PLACE.size
        with open(self._path, "r+b") as file:
            file.seek(offset)
            file.write(_PLACE.pack(*values))
        return offset

    def read_output(self, offset: int) -> bytes:
        """Return the output of the request with its input at ``offset``."""
        with open(self._path, "rb") as file:
            file.seek(offset + _PLACE.size)
            return file.read(_PLACE.size)

    def parameters(self, region: str, offset: int) -> tuple[dict[str, object], dict[str, object]]:
        """Return the parameters of an input at ``offset`` and of its output, in a region of the whole memory."""
        place = {"shared_memory_region": region, "shared_memory_byte_size": _PLACE.size}
        return place | {"shared_memory_offset": offset}, place | {"shared_memory_offset": offset + _PLACE.size}

    @property
    def open_files(self) -> int:
        """The number of this process's file descriptors that refer to the memory."""
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return sum(os.path.lexists(link) and os.readlink(link) == str(self._path) for link in links)

    def remove(self) -> None:
        self._path.unlink()
