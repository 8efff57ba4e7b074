"""Packs and unpacks the tensors of a frame: small ones in its payload, large ones in a channel buffer.

Warns if outputs differ from the model's configuration: undeclared or missing, or with another datatype, shape or number
of rows. As in Triton, undeclared outputs are dropped, and all others are sent as the model returned them. Used at both
ends of a channel, in any environment (standard library only), and by the server for the outputs of remote models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import prod
from typing import Any, Callable, Protocol

from conch.core.errors import internal
from conch.core.tensors import ELEMENT_SIZE, PROTOCOL_NAME, Buffer, Loan, StoredData, WireTensor
from conch.workers.child.buffers import BufferMap, BufferPool, LentFile, OutputLoan

#: ``[name, datatype, shape, size]``, followed by ``buffer, offset`` for data in a channel buffer or a lent file, or by
#: ``-file, offset`` for an output that the worker has written to a lent file.
Descriptor = list[Any]

#: Tensors of at least this size use channel buffers (bytes).
INLINE_LIMIT = 64 << 10
#: Maximum payload of a frame (bytes); further tensors use channel buffers.
PAYLOAD_LIMIT = 1 << 20

_ALIGNMENT = 64


class Elsewhere(Protocol):
    """Destination of outputs that are not sent to the client in a message, such as shared memory regions."""

    def lends(self, name: str) -> bool:
        """Return whether the sender may have written an output there itself."""

    def put(self, name: str, data: memoryview) -> bool:
        """Write an output to the destination; return False if it belongs in the message."""


class Packer:
    """Collects the tensors of one frame; ``Endpoint.encode`` turns it into bytes."""

    __slots__ = ("large", "offers", "payload", "size")

    def __init__(self) -> None:
        self.payload: list[Buffer] = []
        self.size = 0
        self.large: list[tuple[Descriptor, Buffer]] = []
        self.offers: list[tuple[list[int], Loan]] = []

    def add(
        self, name: str, datatype: str, shape: Sequence[int], data: Buffer, loan: OutputLoan | None = None
    ) -> Descriptor:
        """Add a tensor with a flat byte buffer, or write it to the ``loan`` if possible; return its descriptor."""
        size = len(data)
        descriptor: Descriptor = [name, datatype, shape, size]
        taken = loan.take(data) if loan is not None else None
        if taken is not None:
            descriptor.extend(taken)
            return descriptor
        if size >= INLINE_LIMIT or self.size + size > PAYLOAD_LIMIT:
            self.large.append((descriptor, data))
        else:
            self.payload.append(data)
            self.size += size
        return descriptor

    def pack(self, tensors: Sequence[WireTensor]) -> list[Descriptor]:
        """Add tensors and return their descriptors, in order."""
        return [self.add(tensor.name, tensor.datatype, tensor.shape, tensor.data) for tensor in tensors]

    def offer(self, loan: Loan) -> list[int]:
        """Return where the other process may write an output: ``[file, offset, size]``.

        The list lacks ``file`` until the frame is encoded.
        """
        offer = [loan.offset, loan.size]
        self.offers.append((offer, loan))
        return offer

    def fill_buffer(self, pool: BufferPool) -> None:
        """Copy the large tensors into a new buffer, lend files, and complete the descriptors of both."""
        for offer, file in self.offers:
            offer.insert(0, pool.lend(file))
        at = 0
        copied: list[tuple[Descriptor, Buffer]] = []
        for descriptor, data in self.large:
            loan = data.lend() if isinstance(data, StoredData) else None
            if loan is not None:
                descriptor.extend((pool.lend(loan), loan.offset))
                continue
            copied.append((descriptor, data))
            descriptor.extend((0, at))
            at += -(-descriptor[3] // _ALIGNMENT) * _ALIGNMENT
        if not copied:
            return
        buffer = pool.take(at)
        target = memoryview(buffer.map)
        for descriptor, data in copied:
            descriptor[4] = buffer.id
            part = target[descriptor[5] : descriptor[5] + descriptor[3]]
            if isinstance(data, StoredData):
                data.read_into(part)
            else:
                part[:] = data
            part.release()
        target.release()


def lent_outputs(loans: Mapping[str, Sequence[int]], buffers: BufferMap) -> dict[str, OutputLoan]:
    """Return the loans for outputs of a received request that the worker can write itself, by name."""
    return {name: OutputLoan(buffers.files[loan[0]], *loan) for name, loan in loans.items()}


class Unpacker:
    """Unpacks the tensors of a received frame, in the order of its header.

    Data in a channel buffer is copied, and the buffer is released with the next frame sent. Therefore, unpack a whole
    frame before sending anything.
    """

    def __init__(self, payload: Buffer, buffers: BufferMap) -> None:
        self._payload = memoryview(payload)
        self._at = 0
        self._buffers = buffers
        self._used: set[int] = set()
        self._elsewhere: Elsewhere | None = None

    def unpack(self, descriptors: Sequence[Descriptor], elsewhere: Elsewhere | None = None) -> list[WireTensor]:
        """Return tensors backed by the frame or by their own memory; those written ``elsewhere`` have empty data.

        Raises INTERNAL for descriptors with wrong sizes or with data outside of the frame.
        """
        self._elsewhere = elsewhere
        return [WireTensor(*self.take(descriptor)) for descriptor in descriptors]

    def take(self, descriptor: Descriptor) -> tuple[str, str, tuple[int, ...], Buffer]:
        """Return name, datatype, shape and data of the next tensor."""
        try:
            name, datatype, shape, size = descriptor[:4]
            honest = type(size) is int and size >= 0 and (not shape or min(shape) >= 0)
            if not honest or (datatype != "BYTES" and size != ELEMENT_SIZE[datatype] * prod(shape)):
                raise ValueError
            data = self._inline(size) if len(descriptor) == 4 else self._shared(name, size, *descriptor[4:])
        except (TypeError, ValueError, KeyError):
            raise internal(f"a frame describes a tensor wrongly: {descriptor!r:.200}") from None
        return name, datatype, tuple(shape), data

    def _inline(self, size: int) -> Buffer:
        start = self._at
        self._at += size
        if self._at > len(self._payload):
            raise internal("a frame describes more bytes than it has")
        return self._payload[start : self._at]

    def _shared(self, name: str, size: int, id: int, offset: int) -> Buffer:
        if id < 0:
            if self._elsewhere is None or not self._elsewhere.lends(name):
                raise internal(f"the output '{name}' is in an invalid location")
            return b""
        file = self._buffers.files.get(id)
        if file is not None:
            return self.read(file, offset, size)
        buffer = self._buffers.get(id)
        if offset < 0 or offset + size > len(buffer):
            raise internal(f"a tensor reaches outside of channel buffer {id}")
        if self._elsewhere is not None:
            with memoryview(buffer) as whole, whole[offset : offset + size] as data:
                if self._elsewhere.put(name, data):
                    size = 0
        return self.borrow(buffer, id, offset, size)

    def read(self, file: LentFile, offset: int, size: int) -> Buffer:
        """Return the data of a tensor in a lent file; subclasses may allocate other memory."""
        data = bytearray(size)
        with memoryview(data) as target:
            file.read_into(target, offset)
        return data

    def borrow(self, buffer: Any, id: int, offset: int, size: int) -> Buffer:
        """Return a copy of a tensor's data and release its buffer; subclasses may avoid the copy."""
        if id not in self._used:
            self._used.add(id)
            self._buffers.returned.append(id)
        return buffer[offset : offset + size]  # type: ignore[no-any-return]


#: Name, datatype, shape and data of an output.
Output = tuple[str, str, Sequence[int], Any]

#: Maximum number of warnings per worker, because a model may generate output names.
_MOST = 16


class OutputWatch:
    """Checks the responses of the model ``name``; ``warn`` logs a message."""

    def __init__(self, name: str, warn: Callable[[str], None]) -> None:
        self._name = name
        self._warn = warn
        #: Whether the first dimension of tensors is the batch dimension.
        self.batches = False
        #: Declared datatypes (protocol names) by output.
        self.declared: dict[str, str] = {}
        #: Declared dimensions of the model's outputs without the batch dimension; -1 matches any.
        self._dims: dict[str, list[int]] = {}
        #: The last valid shape of each output, without the batch dimension; avoids repeated checks.
        self._fitting: dict[str, Sequence[int]] = {}
        self._logged: set[tuple[str, str]] = set()

    def declare(self, config: Mapping[str, Any]) -> None:
        """Set the declared outputs from the model's effective configuration."""
        self.batches = config.get("max_batch_size", 0) > 0
        self.declared = {output["name"]: PROTOCOL_NAME[output["data_type"]] for output in config.get("output", ())}
        self._dims = {output["name"]: model_dims(output) for output in config.get("output", ()) if "dims" in output}
        for state in (config.get("sequence_batching") or {}).get("state", ()):
            self.declared.setdefault(state["output_name"], PROTOCOL_NAME.get(state["data_type"], "<invalid>"))

    def check(self, outputs: Sequence[Output], requested: Set[str], whole: bool, rows: int | None) -> None:
        """Check a response to a request with ``rows`` rows for the outputs ``requested``.

        Warns of missing outputs only if ``whole`` is set. ``rows`` is None if the response may have any number of rows.
        """
        declared = self.declared
        for name, datatype, shape, _ in outputs:
            if name not in requested or datatype != declared.get(name):
                break
            if rows is not None and (not shape or shape[0] != rows):
                break
            if self._fitting.get(name) != (shape[1:] if self.batches else shape) and not self._fits(name, shape):
                break
        else:
            if not whole or len(outputs) == len(requested):
                return  # the common case
        self._explain(outputs, requested, whole, rows)

    def _explain(self, outputs: Sequence[Output], requested: Set[str], whole: bool, rows: int | None) -> None:
        """Warn of each fault of a response, once per output and kind of fault."""
        for name, datatype, shape, _ in outputs:
            if name in requested:
                self._explain_output(name, datatype, shape, rows)
            elif name not in self.declared and self._is_news(name, "undeclared"):
                declared = ", ".join(f"'{name}'" for name in sorted(self.declared))
                self._warn(
                    f"model '{self._name}' returned the output '{name}', which its configuration does not declare "
                    f"(it declares {declared}); clients do not receive it"
                )
        names = {output[0] for output in outputs}
        for name in sorted(requested - names) if whole else ():
            if self._is_news(name, "missing"):
                self._warn(
                    f"model '{self._name}' did not return the output '{name}', which its configuration declares and a "
                    "request names; its response does not contain it"
                )

    def _explain_output(self, name: str, datatype: str, shape: Sequence[int], rows: int | None) -> None:
        declared = self.declared.get(name, datatype)
        if datatype != declared and self._is_news(name, "datatype"):
            self._warn(
                f"model '{self._name}' returned the output '{name}' as {datatype}, but its configuration declares "
                f"it as {declared}; clients receive {datatype}"
            )
        if rows is not None and list(shape[:1]) != [rows] and self._is_news(name, "rows"):
            self._warn(
                f"model '{self._name}' returned the output '{name}' in the shape {list(shape)} for a request with "
                f"the batch size {rows}, which must be its first dimension; it is sent unchanged"
            )
        elif not self._fits(name, shape) and self._is_news(name, "shape"):
            dims = [-1] * self.batches + self._dims[name]
            self._warn(
                f"model '{self._name}' returned the output '{name}' in the shape {list(shape)}, but its configuration "
                f"declares it as {dims}; it is sent unchanged"
            )

    def _fits(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether an output has the declared dimensions, apart from the batch dimension."""
        dims = self._dims.get(name)
        if dims is None:
            return True
        own = shape[1:] if self.batches else shape
        if self.batches and not shape:
            return False
        if len(own) != len(dims) or any(dim not in (-1, size) for dim, size in zip(dims, own)):
            return False
        self._fitting[name] = own
        return True

    def _is_news(self, name: str, fault: str) -> bool:
        if (name, fault) in self._logged or len(self._logged) >= _MOST:
            return False
        self._logged.add((name, fault))
        return True


def model_dims(tensor: Mapping[str, Any]) -> list[int]:
    """Return the dimensions that the model uses for a tensor: ``reshape`` if given, else ``dims``."""
    reshape = tensor.get("reshape")
    return [int(dim) for dim in (tensor["dims"] if reshape is None else reshape.get("shape", ()))]
