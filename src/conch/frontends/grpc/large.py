"""Messages that take too long for the event loop: decoded and compressed elsewhere.

Small messages are decoded at once (:func:`decode_here`), others by :func:`decode_large`; :func:`compress_large`
compresses large responses. Used by calls, on the event loop.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError, Message

from conch.core.protocol import grpc_service
from conch.core.tensors import Buffer, WireTensor
from conch.frontends.grpc.messages import WBITS, decompress, encode
from conch.frontends.grpc.status import UNREADABLE, CallFault, Status
from conch.frontends.offloading import work
from conch.frontends.offloading.offloader import Offloader, has_many_strings
from conch.machine.threads import compute
from conch.wire.grpc.fields import split_message
from conch.wire.grpc.infer import sent_inputs

#: Up to this size (bytes) a message is parsed whole: copying it is faster than examining its fields.
_WHOLE: Final = 64 << 10
_PARSE: Final = grpc_service.ModelInferRequest.FromString
#: Maximum size parsed or decompressed on the event loop (bytes).
MAX_HERE: Final = 512 << 10
#: Maximum size compressed on the event loop (bytes).
MAX_COMPRESSED_HERE: Final = 64 << 10


class DecodedInfer(NamedTuple):
    """A request of ``size`` bytes, decompressed; ``raw`` are its raw contents if they are not in the message.

    ``elements`` are the numbers of elements of BYTES inputs that have been counted.
    """

    message: grpc_service.ModelInferRequest
    raw: Sequence[Buffer] | None
    size: int
    elements: Sequence[int | None] = ()


def decode_here(data: Buffer) -> DecodedInfer | None:
    """Decode a ``ModelInferRequest``; None if that, or its validation, takes too long here.

    Raises ``CallFault`` for an invalid message.
    """
    decoded = _decode(data)
    return None if decoded is None or _long_tensors(decoded) else decoded


async def decode_large(offloader: Offloader, data: Buffer, encoding: str, limit: int) -> DecodedInfer:
    """Decode a ``ModelInferRequest`` that is large, at most ``limit`` bytes after decompression.

    Raises ``CallFault`` for an invalid or larger message, and the errors of :meth:`Offloader.run`.
    """
    plain = await inflate_large(data, encoding, limit) if encoding != "identity" else data
    del data
    decoded = _decode(plain)
    if decoded is not None:
        if tensors := _long_tensors(decoded):
            message = decoded.message
            counts = await offloader.run(len(plain), work.strings, message.model_name, message.id, tensors)
            by_name = {tensor.name: count for tensor, count in zip(tensors, counts, strict=True)}
            elements = [by_name.get(tensor.name) for tensor in sent_inputs(message)]
            decoded = decoded._replace(elements=elements)
        return decoded
    decoding = offloader.run(len(plain), work.grpc_infer, plain)
    del plain
    rest, raw, elements = await decoding
    # The result of the process is already counted in the server's budget.
    return DecodedInfer(grpc_service.ModelInferRequest.FromString(bytes(rest)), raw, len(rest), elements)


def _decode(data: Buffer) -> DecodedInfer | None:
    """Decode a message; None if its tensors or fields would take too long to read on the event loop."""
    try:
        if len(data) <= _WHOLE:
            return DecodedInfer(_PARSE(bytes(data)), None, len(data))
        parts = split_message(data)
        if parts is None or len(parts[0]) > MAX_HERE:
            return None
        return DecodedInfer(_PARSE(parts[0]), parts[1], len(data))
    except (DecodeError, ValueError):
        raise CallFault(Status.INTERNAL, UNREADABLE) from None


def _long_tensors(decoded: DecodedInfer) -> list[WireTensor]:
    """Return the BYTES inputs whose elements take too long to count here."""
    raw = decoded.raw
    if raw is None:
        return []
    tensors = [
        WireTensor(tensor.name, tensor.datatype, (), data)
        for tensor, data in zip(sent_inputs(decoded.message), raw, strict=False)
        if tensor.datatype == "BYTES"
    ]
    return list(filter(has_many_strings, tensors))


async def decode_control(kind: type[Message], data: Buffer, encoding: str, limit: int) -> Message:
    """Decode a large message of another RPC, like :func:`decode_large`."""
    plain = await inflate_large(data, encoding, limit) if encoding != "identity" else data
    return await compute(parse, kind, plain)


def parse(kind: type[Message], data: Buffer) -> Any:
    """Parse a message; raises ``CallFault`` for an invalid one."""
    try:
        return kind.FromString(bytes(data))
    except DecodeError:
        raise CallFault(Status.INTERNAL, UNREADABLE) from None


async def inflate_large(data: Buffer, encoding: str, limit: int) -> Buffer:
    """Decompress a message up to ``limit`` bytes; raises ``CallFault``."""
    return await compute(decompress, data, encoding, limit)


async def compress_large(body: Sequence[Buffer], encoding: str) -> tuple[list[Buffer], int]:
    """Return the result of :func:`~conch.frontends.grpc.messages.encode` for a large message."""
    return await compute(encode, body, encoding)


def inflate_here(data: Buffer, encoding: str) -> bytes | None:
    """Decompress a message; None if that takes too long here or the message is invalid."""
    decompressor = zlib.decompressobj(WBITS[encoding])
    try:
        plain = decompressor.decompress(data, MAX_HERE)
    except zlib.error:
        return None
    return plain if decompressor.eof else None
