"""The head of a gRPC request: path, deadline, compression and metadata, parsed from its header fields.

Equal header blocks of a connection are parsed once, so heads are shared and immutable. Used by calls; does no I/O.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from conch.http2 import Field, Http2ErrorCode, StreamFault, list_size

_SECONDS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_CONNECTION_FIELDS: Final = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_PSEUDO_FIELDS: Final = {b":method", b":scheme", b":path", b":authority"}


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a request; ``timeout`` is in seconds, ``None`` for none; ``http_status`` is set if it is not gRPC.

    ``size`` is that of all fields (bytes), as counted by HTTP/2; ``content_length`` that of the body (bytes), if
    announced. ``metadata`` are all fields except HTTP/2's own, with lower-case names. The value of a ``-bin`` field is
    decoded to text with one character per byte, as are other values that are not UTF-8.
    """

    path: str
    metadata: tuple[tuple[str, str], ...]
    timeout: float | None
    encoding: str
    accepted_encodings: tuple[str, ...]
    http_status: int | None
    size: int
    content_length: int | None

    def get(self, name: str) -> str | None:
        """Return the first value of a field, None if missing."""
        for key, value in self.metadata:
            if key == name:
                return value
        return None


def parse_head(fields: Sequence[Field]) -> RequestHead:
    """Parse the head of a request; raises ``StreamFault`` for malformed fields (RFC 9113, 8.2)."""
    pseudo: dict[bytes, bytes] = {}
    metadata: list[tuple[str, str]] = []
    for name, value in fields:
        if name.startswith(b":"):
            if metadata or name in pseudo or name not in _PSEUDO_FIELDS:
                raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "misplaced or unknown pseudo-header field")
            pseudo[name] = value
        else:
            _check_field(name, value)
            metadata.append((name.decode("latin-1"), _text(name, value)))
    if len(pseudo.keys() & {b":method", b":scheme", b":path"}) < 3:
        raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "missing pseudo-header field")
    if not pseudo[b":path"]:
        raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "empty :path")
    size = list_size(fields)
    head = RequestHead(pseudo[b":path"].decode("latin-1"), tuple(metadata), None, "identity", (), None, size, None)
    accepted = (head.get("grpc-accept-encoding") or "").split(",")
    return RequestHead(
        head.path,
        head.metadata,
        parse_timeout(head.get("grpc-timeout")),
        head.get("grpc-encoding") or "identity",
        tuple([encoding.strip() for encoding in accepted]),
        _http_status(pseudo[b":method"], head.get("content-type")),
        size,
        _content_length(head.get("content-length")),
    )


def check_trailers(fields: Sequence[Field]) -> None:
    """Check the fields that end a request, which are not used; raises ``StreamFault`` (RFC 9113, 8.1)."""
    for name, value in fields:
        _check_field(name, value)


def _check_field(name: bytes, value: bytes) -> None:
    if not name or name != name.lower() or any(byte <= 0x20 or byte >= 0x7F or byte == 0x3A for byte in name):
        raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "malformed field name")
    if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
        raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "connection-specific field")
    if b"\0" in value or b"\r" in value or b"\n" in value:
        raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "malformed field value")


def _text(name: bytes, value: bytes) -> str:
    if name.endswith(b"-bin"):
        try:
            return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True).decode("latin-1")
        except binascii.Error:
            raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "binary metadata that is not base64") from None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _http_status(method: bytes, content_type: str | None) -> int | None:
    """Return the HTTP status that refuses a request that is not gRPC; None for gRPC, or without a content type."""
    if method != b"POST":
        return 405
    if content_type is None:
        return None
    rest = content_type.removeprefix("application/grpc")
    return 415 if rest == content_type or (rest and rest[0] not in "+;") else None


def _content_length(value: str | None) -> int | None:
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "malformed content-length")
    return int(value)


def parse_timeout(value: str | None) -> float | None:
    """Return a ``grpc-timeout`` (digits and a unit) in seconds, None if missing or invalid."""
    if value is None:
        return None
    digits, unit = value[:-1].strip(), value[-1:]
    if not 1 <= len(digits) <= 15 or not digits.isascii() or not digits.isdigit() or unit not in _SECONDS:
        return None
    return int(digits) * _SECONDS[unit]
