"""Header blocks (HPACK, RFC 7541): decoding what clients send, encoding what the server answers.

The library ``hpack`` decodes; blocks that come again are not decoded again.  Used by one
connection each, on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import hpack
from hpack.table import HeaderTable

from conch.frontends.grpc.http2.frames import ConnectionFault, Http2ErrorCode

#: Bytes of a decoded header list, counted as RFC 7541 does (32 more for each field).
MAX_HEADER_LIST: Final = 32 << 10
#: Decoded blocks that a connection keeps, and the largest that it keeps.
_CACHED_BLOCKS: Final = 256
_CACHED_BLOCK_SIZE: Final = 1024

Field = tuple[bytes, bytes]
Head = TypeVar("Head")


class _WatchedTable(HeaderTable):
    """A dynamic table that says when it may have changed: an entry was added, or it was resized (RFC 7541, 4)."""

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
    """Decodes the blocks of one connection, in the order in which they came.

    What a block means depends on its bytes and the dynamic table only.  So the result of a block
    that leaves the table alone (one of indexed fields, mostly) holds for equal blocks until
    another one changes the table; ``parse`` is then not called again either.
    """

    def __init__(self, parse: Callable[[Sequence[Field]], Head]) -> None:
        self._parse = parse
        self._table = _WatchedTable()
        self._decoder = hpack.Decoder(MAX_HEADER_LIST)
        self._decoder.header_table = self._table
        self._parsed: dict[bytes, Head] = {}

    def head(self, block: bytes) -> Head:
        """What ``parse`` makes of the block's fields; it may raise ``StreamFault``.

        Raises ``ConnectionFault`` for a block that cannot be decoded: the table is lost then.
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
        """The fields of a block; raises ``ConnectionFault``."""
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


def encode_headers(fields: Sequence[Field]) -> bytes:
    """A block that neither reads nor changes a dynamic table: literal fields, never indexed ones' names aside."""
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
