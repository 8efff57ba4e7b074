"""Messages that take too long for the event loop: decoded and compressed elsewhere.

Small messages are decoded at once (:func:`decode_here`), others only by :func:`decode_large`; :func:`compress_large`
compresses large responses. Used by calls, on the event loop.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2

from conch.core.tensors import Buffer
from conch.frontends.grpc.messages import WBITS, decompress, encode
from conch.frontends.grpc.status import UNREADABLE, CallFault, Status
from conch.frontends.offloading.pool import Codec
from conch.frontends.offloading.requests import decode_grpc, has_many_strings
from conch.machine.threads import compute
from conch.wire.grpc.fields import split_message
from conch.wire.grpc.infer import sent_inputs

#: Up to this size (bytes) a message is parsed whole: copying it is faster than examining its fields.
_WHOLE: Final = 64 << 10
_PARSE: Final = service_pb2.ModelInferRequest.FromString
#: Maximum size parsed or decompressed on the event loop (bytes).
MAX_HERE: Final = 512 << 10
#: Maximum size compressed on the event loop (bytes).
MAX_COMPRESSED_HERE: Final = 64 << 10


class DecodedInfer(NamedTuple):
    """A request of ``size`` bytes, decompressed; ``raw`` are its raw contents if they are not in the message.

    ``elements`` are the numbers of elements of BYTES inputs that have been counted.
    """

    message: service_pb2.ModelInferRequest
    raw: Sequence[Buffer] | None
    size: int
    elements: Sequence[int | None] = ()


def decode_here(data: Buffer) -> tuple[service_pb2.ModelInferRequest, Sequence[Buffer] | None] | None:
    """Return a ``ModelInferRequest`` and its raw contents, None if they are in the message.

    Returns None if decoding takes too long here; raises ``CallFault`` for an invalid message.
    """
    try:
        if len(data) <= _WHOLE:
            return _PARSE(bytes(data)), None
        parts = split_message(data)
        if parts is None or len(parts[0]) > MAX_HERE:
            return None
        message = _PARSE(parts[0])
        tensors = zip(sent_inputs(message), parts[1], strict=False)
        if any(tensor.datatype == "BYTES" and has_many_strings(data) for tensor, data in tensors):
            return None
        return message, parts[1]
    except (DecodeError, ValueError):
        raise CallFault(Status.INTERNAL, UNREADABLE) from None


async def decode_large(codec: Codec, data: Buffer, encoding: str, limit: int) -> DecodedInfer:
    """Decode a ``ModelInferRequest`` that is large, at most ``limit`` bytes after decompression.

    Raises ``CallFault`` for an invalid or larger message, and the errors of :func:`decode_grpc`.
    """
    plain = await inflate_large(data, encoding, limit) if encoding != "identity" else data
    del data
    decoded = decode_here(plain)
    if decoded is not None:
        return DecodedInfer(*decoded, len(plain))
    decoding = decode_grpc(codec, plain)
    del plain
    rest, raw, elements = await decoding
    # The result of the codec is already counted in the server's budget.
    return DecodedInfer(service_pb2.ModelInferRequest.FromString(bytes(rest)), raw, len(rest), elements)


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
