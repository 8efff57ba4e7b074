"""A worker's end of a channel whose other end is in the same thread: frames are handed over, not written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from conch.tensors import Buffer
from conch.workers.child.channel import Header
from conch.workers.child.memory import RegionMap
from conch.workers.child.packing import Descriptor, Packer, Unpacker


class LocalChannel:
    """What a backend sees in place of a :class:`conch.workers.child.channel.Channel`.

    ``on_frame`` gets every frame that the backend sends, in the thread that sends it.
    """

    def __init__(self, on_frame: Callable[[Header, Packer], None]) -> None:
        self._on_frame = on_frame
        self._arrived = threading.Condition()
        #: Set by the backend: takes cancellations and answers of other models.
        self.early: Callable[[Header, bytearray], bool] = lambda header, payload: False
        #: Set by the backend: makes what has to go before the next frame.
        self.ahead: Callable[[], Header | None] = lambda: None
        self.regions = RegionMap()
        #: Serial numbers of requests that their client has given up.
        self.cancelled: set[int] = set()

    def send(self, header: Header, packer: Packer | None = None) -> None:
        self.send_ahead()
        self.post(header, packer)

    def send_ahead(self) -> None:
        """Hand over what would go before the next frame."""
        header = self.ahead()
        if header is not None:
            self.post(header)

    def post(self, header: Header, packer: Packer | None = None) -> None:
        """Hand over a frame, and nothing before it."""
        self._on_frame(header, packer or Packer())

    def deliver(self, header: Header, packer: Packer) -> None:
        """Hand the backend an answer; its tensors are ``header["outputs"]``."""
        self.early(header, inline(header["outputs"], packer))
        with self._arrived:
            self._arrived.notify_all()

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until an answer has made ``done()`` true."""
        with self._arrived:
            self._arrived.wait_for(done)

    def poll(self) -> None:
        """Tell the backend which requests have been cancelled."""
        for serial in self.cancelled:
            self.early({"op": "cancel", "serial": serial}, bytearray())


class LocalUnpacker(Unpacker):
    """Takes the tensors of a frame out of the packer that they were put in, as copies."""

    def __init__(self, packer: Packer) -> None:
        super().__init__(b"", RegionMap())
        self._large = {id(descriptor): data for descriptor, data in packer.large}
        self._small = iter(packer.payload)

    def take(self, descriptor: Descriptor) -> tuple[str, str, tuple[int, ...], Buffer]:
        name, datatype, shape, _ = descriptor
        data = self._large.get(id(descriptor))
        return name, datatype, tuple(shape), bytes(next(self._small) if data is None else data)


def inline(descriptors: Sequence[Any], packer: Packer) -> bytearray:
    """The payload of a frame with all its tensors, also the large ones, in the order of ``descriptors``."""
    unpacker = LocalUnpacker(packer)
    return bytearray(b"".join(unpacker.take(descriptor)[3] for descriptor in descriptors))
