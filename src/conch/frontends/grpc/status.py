"""Status codes of gRPC calls, and the header blocks that carry them.

Maps every error code of the server to a gRPC status. Used by calls; does no I/O.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import Final

from conch.core.errors import Code, ConchError
from conch.http2 import encode_headers

#: Triton's message for an invalid or incomplete protocol buffer.
UNREADABLE: Final = "Unable to parse request"
#: Messages are cut to this size (bytes): gRPC clients refuse more than 8 KiB of metadata, including the status.
MAX_MESSAGE: Final = 6 << 10


class Status(IntEnum):
    """gRPC status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


STATUS: Final[dict[Code, Status]] = {
    Code.UNKNOWN: Status.UNKNOWN,
    Code.INTERNAL: Status.INTERNAL,
    Code.NOT_FOUND: Status.NOT_FOUND,
    Code.INVALID_ARG: Status.INVALID_ARGUMENT,
    Code.UNAVAILABLE: Status.UNAVAILABLE,
    Code.UNSUPPORTED: Status.UNIMPLEMENTED,
    Code.ALREADY_EXISTS: Status.ALREADY_EXISTS,
    Code.CANCELLED: Status.CANCELLED,
}


class CallFault(Exception):
    """Ends a call with a gRPC status for which the server has no error code."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


def status_of(error: ConchError | CallFault) -> tuple[Status, str]:
    """Return the status and the message that a client gets for an error."""
    if isinstance(error, CallFault):
        return error.status, str(error)
    return STATUS[error.code], error.public


_RESPONSE: Final = ((b":status", b"200"), (b"content-type", b"application/grpc"))
RESPONSE_HEADERS: Final = encode_headers(_RESPONSE)
OK_TRAILERS: Final = encode_headers([(b"grpc-status", b"0")])


@lru_cache
def response_headers(encoding: str) -> bytes:
    """Return the header block that begins a response; ``encoding`` is the compression of its messages."""
    if encoding == "identity":
        return RESPONSE_HEADERS
    return encode_headers((*_RESPONSE, (b"grpc-encoding", encoding.encode())))


def trailers(status: Status, message: str, *, only: bool, accepts: bytes = b"") -> bytes:
    """Return the header block that ends a call; ``only`` if it is the only block of the response.

    ``accepts`` lists the supported compressions (comma-separated) for a client that used an unsupported one.
    """
    fields = [(b"grpc-status", str(int(status)).encode())]
    if message:
        fields.append((b"grpc-message", encode_message(message)))
    if accepts:
        fields.append((b"grpc-accept-encoding", accepts))
    return encode_headers([*_RESPONSE, *fields] if only else fields)


def http_error(status: int) -> bytes:
    """Return the header block that refuses a request that is not gRPC, with an HTTP status."""
    return encode_headers([(b":status", str(status).encode()), (b"content-length", b"0")])


def encode_message(message: str) -> bytes:
    """Encode a status message as a header value: percent-encoded UTF-8, cut to ``MAX_MESSAGE`` bytes."""
    pieces: list[bytes] = []
    size = 0
    for character in message:
        code = ord(character)
        if 0x20 <= code <= 0x7E and code != 0x25:
            piece = character.encode()
        else:
            piece = b"".join([b"%%%02X" % byte for byte in character.encode("utf-8", "replace")])
        size += len(piece)
        if size > MAX_MESSAGE:
            break
        pieces.append(piece)
    return b"".join(pieces)
