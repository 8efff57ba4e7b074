"""Framing of gRPC messages: a flag, a length, then the message, possibly compressed.

Each call has its own reader; does no I/O.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from struct import Struct
from typing import Final

from conch.core.errors import invalid
from conch.core.tensors import Buffer
from conch.frontends.grpc.status import CallFault, Status
from conch.http2 import STREAM_WINDOW

PREFIX: Final = Struct(">BI")
#: Maximum size of a message in either direction (bytes), the limit of the protocol buffers library.
MAX_MESSAGE_SIZE: Final = 2**31 - 1
#: Messages of at least this size (bytes) have their own memory, which is freed with them. Smaller ones reuse the pages
#: of the previous message, which costs half as much as fresh pages.
_LARGE: Final = 16 << 20
#: Maximum input of one decompression step (bytes), and its maximum output.
_PIECE: Final = 64 << 10
_INFLATED_PIECE: Final = 1 << 20

#: The compressions, with their ``wbits`` for zlib.
WBITS: Final = {"gzip": 31, "deflate": 15}
ENCODINGS: Final = ("identity", "deflate", "gzip")

_TINY: Final = 1024


class MessageReader:
    """Reads messages from chunks of bytes as they arrive; the parts of a message are copied once.

    ``held`` counts received bytes that are not part of a returned message. ``missing`` counts the missing bytes of the
    next message, 0 while its length is unknown. ``compressed`` is true if the last message is compressed.
    """

    __slots__ = ("_buffer", "_chunks", "_length", "compressed", "encoding", "held")

    def __init__(self, encoding: str) -> None:
        self.held = 0
        self.compressed = False
        self.encoding = encoding
        self._chunks: deque[Buffer] = deque()
        self._length = -1
        #: The memory of a large message that is being assembled.
        self._buffer: mmap | None = None

    @property
    def missing(self) -> int:
        return max(0, self._length - self.held)

    @property
    def large(self) -> bool:
        """Whether the next message is larger than the window of a stream."""
        return self._length > STREAM_WINDOW

    def feed(self, chunk: Buffer) -> None:
        """Add a received chunk."""
        if self._buffer is not None:
            taken = min(len(chunk), self.missing)
            self._buffer.write(memoryview(chunk)[:taken])
            self.held += taken
            if taken == len(chunk):
                return
            chunk = memoryview(chunk)[taken:]
        self.held += len(chunk)
        chunks = self._chunks
        if not chunks or len(chunk) >= _TINY:
            chunks.append(chunk)
        elif type(chunks[-1]) is bytearray:
            chunks[-1] += chunk
        else:
            # The next chunks are appended to this one, so that many tiny chunks do not each need an object.
            chunks.append(bytearray(chunk))

    def next(self) -> Buffer | None:
        """Return the next message as received, once it is complete; raises ``CallFault`` for an invalid one."""
        length = self._length
        if length < 0:
            if self.held < 5:
                return None
            chunk = self._chunks[0]
            flag, length = PREFIX.unpack(self._take(5) if len(chunk) < 5 else chunk[:5])
            self.compressed = flag != 0 and self._check_flag(flag)
            if length > MAX_MESSAGE_SIZE:
                raise CallFault(
                    Status.RESOURCE_EXHAUSTED, f"Received message larger than max ({length} vs. {MAX_MESSAGE_SIZE})"
                )
            if len(chunk) >= 5:
                self._take(5)
            self._length = length
            if length >= _LARGE and self.held < length:
                self._make_buffer(length)
        if self.held < length:
            return None
        self._length = -1
        if self._buffer is None:
            return self._take(length)
        self.held -= length
        message, self._buffer = memoryview(self._buffer), None
        return message

    def _make_buffer(self, length: int) -> None:
        self._buffer = _memory(length)
        for chunk in self._chunks:
            self._buffer.write(chunk)
        self._chunks.clear()

    def _check_flag(self, flag: int) -> bool:
        if flag != 1:
            raise CallFault(Status.INTERNAL, f"Invalid compression flag {flag}")
        if self.encoding == "identity":
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


def _memory(size: int) -> mmap:
    """Allocate memory that becomes resident only as it is written; raises ``CallFault`` if there is too little."""
    try:
        return mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    except OSError as error:
        raise CallFault(Status.RESOURCE_EXHAUSTED, f"no memory for a message of {size} bytes: {error}") from None


#: The reader of a call that has received only whole messages so far.
NOTHING_READ: Final = MessageReader("identity")


def whole_message(chunk: Buffer) -> bytes | None:
    """Return the message of a chunk that is exactly one uncompressed message, as most are; otherwise None."""
    if type(chunk) is not bytes or len(chunk) < PREFIX.size:
        return None
    flag, length = PREFIX.unpack_from(chunk)
    return chunk[PREFIX.size :] if not flag and length + PREFIX.size == len(chunk) else None


def decompress(message: Buffer, encoding: str, limit: int) -> Buffer:
    """Decompress a message; raises ``CallFault`` if it is malformed or exceeds ``limit`` bytes.

    Works in steps that let other threads take the interpreter lock, and writes into memory that is not moved again.
    """
    decompressor = zlib.decompressobj(WBITS[encoding])
    limit = min(limit, MAX_MESSAGE_SIZE)
    plain = _memory(limit + _INFLATED_PIECE)
    view = memoryview(message)
    try:
        for at in range(0, len(view), _PIECE):
            data: Buffer = view[at : at + _PIECE]
            more = True
            while more and not decompressor.eof:
                piece = decompressor.decompress(data, _INFLATED_PIECE)
                plain.write(piece)
                data = decompressor.unconsumed_tail
                more = bool(data) or len(piece) == _INFLATED_PIECE
                if plain.tell() > limit:
                    raise CallFault(
                        Status.RESOURCE_EXHAUSTED,
                        f"Decompressed message larger than max ({limit}). Use --grpc-max-decompressed-size to increase"
                        " the limit.",
                    )
        whole = decompressor.eof
    except zlib.error:
        whole = False
    if not whole:
        raise CallFault(Status.INTERNAL, f"Unexpected error decompressing data for algorithm {encoding}")
    return memoryview(plain)[: plain.tell()]


def encode(body: Sequence[Buffer], encoding: str = "identity") -> tuple[list[Buffer], int]:
    """Return the parts of a message with its prefix, and their size; ``body`` is the message in parts.

    Compresses with ``encoding`` if that makes the message smaller. Raises INVALID_ARG for a message that is too large.
    """
    size = sum(map(len, body))
    if size > MAX_MESSAGE_SIZE:
        raise invalid(f"Response has byte size {size} which exceeds gRPC's byte size limit {MAX_MESSAGE_SIZE}.")
    if encoding != "identity":
        compressor = zlib.compressobj(wbits=WBITS[encoding])
        parts = [compressor.compress(part) for part in body]
        parts.append(compressor.flush())
        smaller = sum(map(len, parts))
        if smaller < size:
            return [PREFIX.pack(1, smaller), *parts], PREFIX.size + smaller
    return [PREFIX.pack(0, size), *body], PREFIX.size + size


def choose_encoding(level: str, accepted: Sequence[str]) -> str:
    """Return the accepted compression for a level: ``none``, ``low``, ``medium`` or ``high``.

    As in gRPC, ``low`` is the cheapest and ``high`` the most thorough.
    """
    if level == "none":
        return "identity"
    usable = [encoding for encoding in ("gzip", "deflate") if encoding in accepted]
    if not usable:
        return "identity"
    return usable[0] if level == "low" else usable[len(usable) // 2] if level == "medium" else usable[-1]
