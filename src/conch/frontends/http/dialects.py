"""The client APIs of the HTTP port: the status of each error code, and the form of errors; each endpoint has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from conch.core.errors import Code, ConchError
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.wire.anthropic import message as anthropic
from conch.wire.compression import ACCEPTED, UNSUPPORTED_ENCODING
from conch.wire.json import control as kserve
from conch.wire.openai import reading as openai
from conch.wire.retrieval import cohere, tei

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
#: The clients of OpenAI, Anthropic and Cohere retry after any status of 500 or higher.
_OPENAI_STATUS: Final = {**STATUS, Code.UNSUPPORTED: 400}
_ANTHROPIC_STATUS: Final = {**_OPENAI_STATUS, Code.UNAVAILABLE: 529}
_RETRY: Final = (b"Retry-After", b"1")
_ENCODINGS: Final = (b"Accept-Encoding", ACCEPTED.encode())


class Dialect(NamedTuple):
    """``status`` returns the status of an error, ``body`` the body of a response with a status and an error.

    ``denied`` is the status of a request without the header of a restricted API. Responses with the statuses ``busy``
    include ``Retry-After``. ``request_id`` is the header with the id of the request in every response; clients may
    choose the id with ``X-Request-Id``. ``duration`` is the header with the time to the response (ms).
    """

    status: Callable[[ConchError], int]
    body: Callable[[int, ConchError], bytes]
    denied: int
    busy: tuple[int, ...] = (503,)
    request_id: bytes = b""
    duration: bytes = b""


KSERVE: Final = Dialect(
    lambda error: STATUS[error.code], lambda status, error: kserve.error_body(error.public), denied=403
)
OPENAI: Final = Dialect(
    lambda error: _OPENAI_STATUS[error.code], openai.error_body, denied=401, request_id=b"X-Request-Id",
    duration=b"OpenAI-Processing-Ms",
)  # fmt: skip
ANTHROPIC: Final = Dialect(
    lambda error: _ANTHROPIC_STATUS[error.code], anthropic.error_body, denied=401, busy=(503, 529),
    request_id=b"request-id",
)  # fmt: skip
COHERE: Final = Dialect(
    lambda error: _OPENAI_STATUS[error.code], cohere.error_body, denied=401, request_id=b"X-Request-Id"
)
TEI: Final = Dialect(tei.status_of, tei.error_body, denied=401, busy=(429, 503), request_id=b"X-Request-Id")


def refuse(exchange: HttpExchange, error: ConchError, status: int = 0) -> None:
    """Respond with an error in the dialect of the exchange; ``status`` overrides the status of the error.

    The response to an unsupported compression includes the supported ones.
    """
    dialect = exchange.dialect or KSERVE
    status = status or dialect.status(error)
    headers = [JSON]
    if status in dialect.busy:
        headers.append(_RETRY)
    if error.reason == UNSUPPORTED_ENCODING:
        headers.append(_ENCODINGS)
    exchange.respond(status, headers, dialect.body(status, error))
