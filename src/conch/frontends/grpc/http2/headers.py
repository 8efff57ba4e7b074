"""Header blocks (HPACK, RFC 7541): decodes those of clients, encodes those of the server.

The library ``hpack`` decodes; a block that repeats is decoded once.  Each connection has a decoder of its own and uses
it on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import hpack
from hpack.table import HeaderTable

from conch.frontends.grpc.http2.frames import ConnectionFault, Http2ErrorCode
from conch.frontends.grpc.http2.limits import MAX_CONTINUATIONS, MAX_HEADER_BLOCK

#: Bytes of a decoded header list, counted as RFC 7541 does (32 more for each field), up to which a request is served,
#: and up to which one is decoded, so that the table stays that of the client and only the request is refused.
MAX_HEADER_LIST: Final = 32 << 10
MAX_DECODED_LIST: Final = 128 << 10
#: Decoded blocks that a connection keeps, and the largest that it keeps.
_CACHED_BLOCKS: Final = 256
_CACHED_BLOCK_SIZE: Final = 1024

Field = tuple[bytes, bytes]
Head = TypeVar("Head")


class _WatchedTable(HeaderTable):
    """A dynamic table that notes in ``changed`` that an entry was added or that it was resized (RFC 7541, 4)."""

    def __init__(self) -> None:
        self.changed = False
        super().__init__()

    def add(self, name: bytes, value: bytes) -> None:
        self.changed = True
        super().add(name, value)

    @property
    def maxsize(self) -> int:
        return self._maxsize

    @maxsize.setter
    def maxsize(self, size: int) -> None:
        self.changed = True
        HeaderTable.maxsize.fset(self, size)  # type: ignore[attr-defined]


class HeaderDecoder(Generic[Head]):
    """Decodes the blocks of one connection, which must be given in the order of their arrival.

    What a block means depends only on its bytes and the dynamic table.  So the result for a block that leaves the
    table alone (one of indexed fields, mostly) is kept and serves equal blocks until another block changes the table;
    ``parse`` is not called for them again.
    """

    def __init__(self, parse: Callable[[Sequence[Field]], Head]) -> None:
        self._parse = parse
        self._table = _WatchedTable()
        self._decoder = hpack.Decoder(MAX_DECODED_LIST)
        self._decoder.header_table = self._table
        self._parsed: dict[bytes, Head] = {}

    def head(self, block: bytes) -> Head:
        """The block's fields as ``parse`` returns them.

        Raises ``StreamFault`` if ``parse`` does, and ``ConnectionFault`` for a block that cannot be decoded, after
        which the table is no longer that of the client.
        """
        known = self._parsed.get(block)
        if known is not None:
            return known
        fields = self.fields(block)
        head = self._parse(fields)
        if not self._table.changed and len(block) <= _CACHED_BLOCK_SIZE:
            if len(self._parsed) >= _CACHED_BLOCKS:
                self._parsed.clear()
            self._parsed[block] = head
        return head

    def fields(self, block: bytes) -> Sequence[Field]:
        """The fields of a block, names and values; raises ``ConnectionFault`` for one that cannot be decoded."""
        self._table.changed = False
        try:
            fields: Sequence[Any] = list(self._decoder.decode(block, raw=True))
        except hpack.OversizedHeaderListError:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "header list too large") from None
        except (hpack.HPACKError, IndexError, ValueError):
            raise ConnectionFault(Http2ErrorCode.COMPRESSION_ERROR, "header block cannot be decoded") from None
        if self._table.changed:
            self._parsed.clear()
        return fields


class PartialHeaderBlock:
    """A header block whose CONTINUATION frames are still arriving; ``flags`` are those of its HEADERS frame."""

    def __init__(self, stream_id: int, flags: int, payload: bytes) -> None:
        self.stream_id = stream_id
        self.flags = flags
        self._parts = [payload]
        self._size = len(payload)

    def add(self, payload: bytes) -> None:
        """Append a part; raises ``ConnectionFault`` if the block becomes too large."""
        self._parts.append(payload)
        self._size += len(payload)
        if len(self._parts) > MAX_CONTINUATIONS or self._size > MAX_HEADER_BLOCK:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "header block too large")

    def joined(self) -> bytes:
        """The whole block."""
        return b"".join(self._parts)


def list_size(fields: Sequence[Field]) -> int:
    """The size (bytes) of a header list, counted as RFC 7541 does."""
    return sum([32 + len(name) + len(value) for name, value in fields])


def encode_headers(fields: Sequence[Field]) -> bytes:
    """A block of literal fields, which neither reads nor changes the client's dynamic table."""
    return b"".join([_encode_field(name, value) for name, value in fields])


def _encode_field(name: bytes, value: bytes) -> bytes:
    if name == b":status":
        index = {b"200": 0x88, b"400": 0x8C}.get(value)
        return bytes([index]) if index else b"\x08" + _encode_string(value)
    return b"\x00" + _encode_string(name) + _encode_string(value)


def _encode_string(value: bytes) -> bytes:
    """A string literal without Huffman coding: its length in a prefix of 7 bits, then its bytes."""
    length = len(value)
    if length < 127:
        return bytes([length]) + value
    digits = [127]
    length -= 127
    while length >= 128:
        digits.append(length & 127 | 128)
        length >>= 7
    digits.append(length)
    return bytes(digits) + value
