"""How the tensors of a frame travel: small ones in its payload, large ones in a memory region.

Used at both ends of a channel, in any environment (standard library only).
"""

from __future__ import annotations

from math import prod
from typing import Any, List, Sequence, Set, Tuple

from conch.errors import internal
from conch.tensors import ELEMENT_SIZE, Buffer, WireTensor
from conch.workers.child.memory import RegionMap, RegionPool

#: ``[name, datatype, shape, size]``, followed by ``region, offset`` for bytes in a memory region.
Descriptor = List[Any]

#: Tensors of this many bytes and more go through memory regions.
INLINE_LIMIT = 64 << 10
#: So do all others once a frame has collected this much.
PAYLOAD_LIMIT = 1 << 20

_ALIGNMENT = 64


class Packer:
    """Collects the tensors of one frame; ``Endpoint.encode`` turns it into bytes."""

    __slots__ = ("large", "payload", "size")

    def __init__(self) -> None:
        self.payload: List[Buffer] = []
        self.size = 0
        self.large: List[Tuple[Descriptor, Buffer]] = []

    def add(self, name: str, datatype: str, shape: Sequence[int], data: Buffer) -> Descriptor:
        """The descriptor of a tensor whose ``data`` is a flat buffer of bytes."""
        size = len(data)
        descriptor: Descriptor = [name, datatype, shape, size]
        if size >= INLINE_LIMIT or self.size + size > PAYLOAD_LIMIT:
            self.large.append((descriptor, data))
        else:
            self.payload.append(data)
            self.size += size
        return descriptor

    def pack(self, tensors: Sequence[WireTensor]) -> List[Descriptor]:
        """Descriptors of tensors, in order."""
        return [self.add(tensor.name, tensor.datatype, tensor.shape, tensor.data) for tensor in tensors]

    def fill_region(self, pool: RegionPool) -> None:
        """Copy the large tensors into a region of their own and complete their descriptors."""
        at = 0
        for descriptor, _ in self.large:
            descriptor.extend((0, at))
            at += -(-descriptor[3] // _ALIGNMENT) * _ALIGNMENT
        region = pool.take(at)
        target = memoryview(region.map)
        for descriptor, data in self.large:
            descriptor[4] = region.id
            target[descriptor[5] : descriptor[5] + descriptor[3]] = data
        target.release()


class Unpacker:
    """Takes the tensors of one received frame apart, in the order in which the header has them.

    Data in a memory region is copied out, and the region given back with the next frame sent; so
    unpack a whole frame before anything is sent.
    """

    def __init__(self, payload: Buffer, regions: RegionMap) -> None:
        self._payload = memoryview(payload)
        self._at = 0
        self._regions = regions
        self._used: Set[int] = set()

    def unpack(self, descriptors: Sequence[Descriptor]) -> List[WireTensor]:
        """Tensors whose data is memory of the frame or of their own.

        Raises INTERNAL for descriptors that lie about sizes or reach outside of the frame.
        """
        return [WireTensor(*self.take(descriptor)) for descriptor in descriptors]

    def take(self, descriptor: Descriptor) -> Tuple[str, str, Tuple[int, ...], Buffer]:
        """Name, datatype, shape and data of the next tensor."""
        try:
            name, datatype, shape, size = descriptor[:4]
            honest = type(size) is int and size >= 0 and (not shape or min(shape) >= 0)
            if not honest or (datatype != "BYTES" and size != ELEMENT_SIZE[datatype] * prod(shape)):
                raise ValueError
            data = self._inline(size) if len(descriptor) == 4 else self._shared(size, *descriptor[4:])
        except (TypeError, ValueError, KeyError):
            raise internal(f"a frame describes a tensor wrongly: {descriptor!r:.200}") from None
        return name, datatype, tuple(shape), data

    def _inline(self, size: int) -> Buffer:
        start = self._at
        self._at += size
        if self._at > len(self._payload):
            raise internal("a frame describes more bytes than it has")
        return self._payload[start : self._at]

    def _shared(self, size: int, id: int, offset: int) -> Buffer:
        region = self._regions.get(id)
        if offset < 0 or offset + size > len(region):
            raise internal(f"a tensor reaches outside of memory region {id}")
        return self.borrow(region, id, offset, size)

    def borrow(self, region: Any, id: int, offset: int, size: int) -> Buffer:
        """The bytes of a tensor in a region that is given back; another policy overrides this."""
        if id not in self._used:
            self._used.add(id)
            self._regions.returned.append(id)
        return region[offset : offset + size]  # type: ignore[no-any-return]
