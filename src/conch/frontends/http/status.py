"""Errors of the KServe API: the HTTP status of each error code, and the error body."""

from __future__ import annotations

from typing import Final

from conch.core.errors import Code, ConchError
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.wire.compression import ACCEPTED, UNSUPPORTED_COMPRESSION
from conch.wire.json.control import error_body

STATUS: Final = {
    Code.UNKNOWN: 400,
    Code.INTERNAL: 500,
    Code.NOT_FOUND: 404,
    Code.INVALID_ARG: 400,
    Code.UNAVAILABLE: 503,
    Code.UNSUPPORTED: 501,
    Code.ALREADY_EXISTS: 400,
    Code.CANCELLED: 400,
}
RETRY: Final = (b"Retry-After", b"1")
_ENCODINGS: Final = (b"Accept-Encoding", ACCEPTED.encode())


def refuse(exchange: HttpExchange, error: ConchError, status: int = 0) -> None:
    """Respond with an error.

    A 503 response includes ``Retry-After``; an unsupported compression includes the supported ones. ``status``
    overrides the status of the error's code.
    """
    status = status or STATUS[error.code]
    retry = [RETRY] if status == 503 else []
    encodings = [_ENCODINGS] if error.message == UNSUPPORTED_COMPRESSION else []
    exchange.respond(status, [JSON, *retry, *encodings], error_body(error.public))
