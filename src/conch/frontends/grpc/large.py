"""Messages that take too long for the event loop: decoded and compressed elsewhere.

What is small is decoded at once (:func:`decode_here`); :func:`decode_large` and :func:`compress_large` are the only
places where other messages are.  Called by calls, on the event loop.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2

from conch.frontends.grpc.messages import WBITS, decompress, encode
from conch.frontends.grpc.status import UNREADABLE, CallFault, Status
from conch.frontends.offloading.pool import Codec
from conch.frontends.offloading.requests import decode_grpc, has_many_strings
from conch.tensors import Buffer
from conch.threads import compute
from conch.wire.grpc.fields import split_message
from conch.wire.grpc.infer import sent_inputs

#: Up to this size (bytes) a message is parsed whole: its bytes are copied faster than its fields are looked at.
_WHOLE: Final = 64 << 10
_PARSE: Final = service_pb2.ModelInferRequest.FromString
#: What is parsed or inflated (bytes) on the event loop.
MAX_HERE: Final = 512 << 10
#: What is compressed (bytes) on the event loop.
MAX_COMPRESSED_HERE: Final = 64 << 10


class DecodedInfer(NamedTuple):
    """A request of ``size`` bytes, decompressed; ``raw`` are its raw contents where they are not in the message.

    ``elements`` are the numbers of their elements where they are BYTES and have been counted.
    """

    message: service_pb2.ModelInferRequest
    raw: Sequence[Buffer] | None
    size: int
    elements: Sequence[int | None] = ()


def decode_here(data: Buffer) -> tuple[service_pb2.ModelInferRequest, Sequence[Buffer] | None] | None:
    """A ``ModelInferRequest`` and its raw contents, None for those where they are in the message.

    None where it takes too long here; raises ``CallFault`` for what is not one.
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
    """A ``ModelInferRequest`` that is large, or becomes so by decompression, which may be up to ``limit`` bytes.

    Raises ``CallFault`` for what is not one, or larger, and what :func:`decode_grpc` does.
    """
    plain = await inflate_large(data, encoding, limit) if encoding != "identity" else data
    del data
    decoded = decode_here(plain)
    if decoded is not None:
        return DecodedInfer(*decoded, len(plain))
    decoding = decode_grpc(codec, plain)
    del plain
    rest, raw, elements = await decoding
    # What the codec gives counts in the server's budget already.
    return DecodedInfer(service_pb2.ModelInferRequest.FromString(bytes(rest)), raw, len(rest), elements)


async def decode_control(kind: type[Message], data: Buffer, encoding: str, limit: int) -> Message:
    """A large message of another RPC, as :func:`decode_large`."""
    plain = await inflate_large(data, encoding, limit) if encoding != "identity" else data
    return await compute(parse, kind, plain)


def parse(kind: type[Message], data: Buffer) -> Any:
    """A message of a kind; raises ``CallFault`` for what is not one."""
    try:
        return kind.FromString(bytes(data))
    except DecodeError:
        raise CallFault(Status.INTERNAL, UNREADABLE) from None


async def inflate_large(data: Buffer, encoding: str, limit: int) -> Buffer:
    """A compressed message as it was, up to ``limit`` bytes; raises ``CallFault``."""
    return await compute(decompress, data, encoding, limit)


async def compress_large(body: Sequence[Buffer], encoding: str) -> tuple[list[Buffer], int]:
    """What :func:`~conch.frontends.grpc.messages.encode` returns for a large message."""
    return await compute(encode, body, encoding)


def inflate_here(data: Buffer, encoding: str) -> bytes | None:
    """A compressed message as it was, None where that takes too long here, or it is broken."""
    decompressor = zlib.decompressobj(WBITS[encoding])
    try:
        plain = decompressor.decompress(data, MAX_HERE)
    except zlib.error:
        return None
    return plain if decompressor.eof else None
