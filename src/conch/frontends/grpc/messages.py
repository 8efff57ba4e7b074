"""Framing of gRPC messages: a flag, a length, then the message, perhaps compressed.

Each call has a reader of its own; pure.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Final

from conch.errors import invalid
from conch.frontends.grpc.status import CallFault, Status
from conch.tensors import Buffer

PREFIX: Final = Struct(">BI")
#: The largest message (bytes) in either direction: what the protocol buffers library can handle.
MAX_MESSAGE_SIZE: Final = 2**31 - 1
#: The largest size (bytes) of a decompressed message.
MAX_DECOMPRESSED_SIZE: Final = 256 << 20

#: The compressions, with the ``wbits`` that zlib has for them.
_WBITS: Final = {"gzip": 31, "deflate": 15}
ENCODINGS: Final = ("identity", "deflate", "gzip")

_TINY: Final = 1024


class MessageReader:
    """Reads messages from chunks of bytes as they arrive; the parts of a message are joined once.

    ``held`` counts the bytes that were received and are in no message yet, ``missing`` those that the next message
    lacks, 0 while its length is not known.
    """

    __slots__ = ("_chunks", "_compressed", "_encoding", "_length", "held")

    def __init__(self, encoding: str) -> None:
        self.held = 0
        self._encoding = encoding
        self._chunks: deque[Buffer] = deque()
        self._length = -1
        self._compressed = False

    @property
    def missing(self) -> int:
        return max(0, self._length - self.held)

    def feed(self, chunk: Buffer) -> None:
        """Add a chunk that has arrived."""
        self.held += len(chunk)
        chunks = self._chunks
        if not chunks or len(chunk) >= _TINY:
            chunks.append(chunk)
        elif type(chunks[-1]) is bytearray:
            chunks[-1] += chunk
        else:
            # The next chunks are appended to this one: many tiny chunks must not each cost an object.
            chunks.append(bytearray(chunk))

    def next(self) -> bytes | None:
        """The next message once it is complete; raises ``CallFault`` for one that cannot be read."""
        length = self._length
        if length < 0:
            if self.held < 5:
                return None
            chunk = self._chunks[0]
            flag, length = PREFIX.unpack(self._take(5) if len(chunk) < 5 else chunk[:5])
            self._compressed = flag != 0 and self._check_flag(flag)
            if self.held == len(chunk) == length + 5 and type(chunk) is bytes:
                # A message that came in one piece.
                self._chunks.clear()
                self.held = 0
                return decompress(chunk[5:], self._encoding) if self._compressed else chunk[5:]
            if length > MAX_MESSAGE_SIZE:
                raise CallFault(
                    Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {MAX_MESSAGE_SIZE})"
                )
            if len(chunk) >= 5:
                self._take(5)
            self._length = length
        if self.held < length:
            return None
        message = self._take(length)
        self._length = -1
        return decompress(message, self._encoding) if self._compressed else message

    def _check_flag(self, flag: int) -> bool:
        if flag == 0:
            return False
        if flag != 1:
            raise CallFault(Status.INTERNAL, f"Invalid compression flag {flag}")
        if self._encoding == "identity":
            raise CallFault(Status.INTERNAL, "Compressed message without a grpc-encoding")
        return True

    def _take(self, size: int) -> bytes:
        chunks = self._chunks
        self.held -= size
        parts: list[Buffer] = []
        while size:
            chunk = chunks[0]
            if len(chunk) <= size:
                chunks.popleft()
                size -= len(chunk)
                parts.append(chunk)
            else:
                view = memoryview(chunk)
                parts.append(view[:size])
                chunks[0] = view[size:]
                size = 0
        return b"".join(parts)


def decompress(message: bytes, encoding: str) -> bytes:
    """The message that was compressed; raises ``CallFault`` if it is malformed or too large."""
    decompressor = zlib.decompressobj(_WBITS[encoding])
    try:
        plain = decompressor.decompress(message, MAX_DECOMPRESSED_SIZE)
        if decompressor.unconsumed_tail:
            raise CallFault(
                Status.RESOURCE_EXHAUSTED,
                f"Decompressed message larger than max ({MAX_DECOMPRESSED_SIZE})",
            )
        complete = decompressor.eof
    except zlib.error:
        complete = False
    if not complete:
        raise CallFault(Status.INTERNAL, f"Unexpected error decompressing data for algorithm {encoding}")
    return plain


def encode(body: Sequence[Buffer], encoding: str = "identity") -> tuple[list[Buffer], int]:
    """The parts of a message with its prefix in front, and their size; ``body`` is the message in parts.

    It is compressed with ``encoding`` if that makes it smaller.  Raises INVALID_ARG for a message that is too large.
    """
    size = sum(map(len, body))
    if size > MAX_MESSAGE_SIZE:
        raise invalid(f"Response has byte size {size} which exceeds gRPC's byte size limit {MAX_MESSAGE_SIZE}.")
    if encoding != "identity":
        compressor = zlib.compressobj(wbits=_WBITS[encoding])
        parts = [compressor.compress(part) for part in body]
        parts.append(compressor.flush())
        smaller = sum(map(len, parts))
        if smaller < size:
            return [PREFIX.pack(1, smaller), *parts], PREFIX.size + smaller
    return [PREFIX.pack(0, size), *body], PREFIX.size + size


def choose_encoding(level: str, accepted: Sequence[str]) -> str:
    """The compression for a level (``none``, ``low``, ``medium``, ``high``), from those that the client accepts.

    As in gRPC, ``low`` is the cheapest and ``high`` the most thorough.
    """
    if level == "none":
        return "identity"
    usable = [encoding for encoding in ("gzip", "deflate") if encoding in accepted]
    if not usable:
        return "identity"
    return usable[0] if level == "low" else usable[len(usable) // 2] if level == "medium" else usable[-1]
