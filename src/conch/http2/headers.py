"""Header blocks (HPACK, RFC 7541): decodes those of clients, encodes those of the server.

The library ``hpack`` decodes; repeated blocks are decoded once. Each connection has its own decoder and uses it on the
event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import hpack
from hpack.table import HeaderTable

from conch.http2.frames import ConnectionFault, Http2ErrorCode
from conch.http2.limits import MAX_CONTINUATIONS, MAX_HEADER_BLOCK

#: Maximum size of a decoded header list (bytes, counted as in RFC 7541 with 32 more per field) for a served request,
#: and for decoding. Decoding larger lists keeps the table in step with the client, so that only the request is refused.
MAX_HEADER_LIST: Final = 32 << 10
MAX_DECODED_LIST: Final = 128 << 10
#: Maximum number of decoded blocks that a connection caches, and their maximum size (bytes).
_CACHED_BLOCKS: Final = 256
_CACHED_BLOCK_SIZE: Final = 1024

Field = tuple[bytes, bytes]
Head = TypeVar("Head")


class _WatchedTable(HeaderTable):
    """A dynamic table that sets ``changed`` when an entry is added or the table is resized (RFC 7541, 4)."""

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
    """Decodes the header blocks of one connection, in order of arrival.

    The meaning of a block depends only on its bytes and the dynamic table. The result for a block that does not change
    the table (mostly a block of indexed fields) is therefore cached for equal blocks until another block changes the
    table; ``parse`` is not called for them again.
    """

    def __init__(self, parse: Callable[[Sequence[Field]], Head]) -> None:
        self._parse = parse
        self._table = _WatchedTable()
        self._decoder = hpack.Decoder(MAX_DECODED_LIST)
        self._decoder.header_table = self._table
        self._parsed: dict[bytes, Head] = {}

    def head(self, block: bytes) -> Head:
        """Return the block's fields as parsed by ``parse``.

        Raises the ``StreamFault`` of ``parse``, and ``ConnectionFault`` for a block that cannot be decoded, after which
        the table no longer matches the client's.
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
        """Return the fields of a block, names and values; raises ``ConnectionFault`` for an invalid block."""
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
        """Return the whole block."""
        return b"".join(self._parts)


def list_size(fields: Sequence[Field]) -> int:
    """Return the size of a header list (bytes), counted as in RFC 7541."""
    return sum([32 + len(name) + len(value) for name, value in fields])


def encode_headers(fields: Sequence[Field]) -> bytes:
    """Encode a block of literal fields, which neither reads nor changes the client's dynamic table."""
    return b"".join([_encode_field(name, value) for name, value in fields])


def _encode_field(name: bytes, value: bytes) -> bytes:
    if name == b":status":
        index = {b"200": 0x88, b"400": 0x8C}.get(value)
        return bytes([index]) if index else b"\x08" + _encode_string(value)
    return b"\x00" + _encode_string(name) + _encode_string(value)


def _encode_string(value: bytes) -> bytes:
    """Encode a string literal without Huffman coding: its length in a 7-bit prefix, then its bytes."""
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
