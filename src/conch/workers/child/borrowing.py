"""Zero-copy input tensors backed by the server's channel buffers. Needs numpy; runs in any environment."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from conch.workers.child.buffers import LentFile
from conch.workers.child.channel import Channel
from conch.workers.child.packing import Unpacker


class BorrowingUnpacker(Unpacker):
    """Unpacks frames in a worker without copying; releases a buffer when the last array backed by it is freed."""

    def __init__(self, payload: bytearray, channel: Channel) -> None:
        super().__init__(payload, channel.buffers)
        self._channel = channel
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}

    def borrow(self, buffer: Any, id: int, offset: int, size: int) -> Any:
        array = self._arrays.get(id)
        if array is None:
            # Every view of this array keeps it alive, however the view was created.
            array = self._arrays[id] = np.frombuffer(buffer, np.uint8)
            weakref.finalize(array, self._channel.release_buffer, id).atexit = False
        return array[offset : offset + size]

    def read(self, file: LentFile, offset: int, size: int) -> Any:
        array = np.empty(size, np.uint8)  # unlike a bytearray, not zeroed first
        file.read_into(array.data, offset)
        return array
