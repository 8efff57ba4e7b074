"""The forms of errors in the client APIs of the HTTP port; each endpoint has one.

The statuses of OpenAI and KServe are in ``openai_status.py`` and ``status.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from conch.core.errors import Code, ConchError
from conch.frontends.http import openai_status
from conch.frontends.http import status as kserve_status
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.status import RETRY
from conch.wire.anthropic import errors as anthropic_errors
from conch.wire.retrieval import errors


class Dialect(NamedTuple):
    """``refuse`` responds with an error; its status 0 selects that of the error's code.

    ``denied`` is the status of a request without the header of a restricted API. ``request_id`` is the header with the
    id of the request in every response; clients may choose the id with ``X-Request-Id``. ``duration`` is the header
    with the time to the response (ms).
    """

    refuse: Callable[[HttpExchange, ConchError, int], None]
    denied: int
    request_id: bytes = b""
    duration: bytes = b""


#: The clients of Cohere and Anthropic retry after any status of 500 or higher, as OpenAI's does.
_COHERE_STATUS: Final = {**kserve_status.STATUS, Code.UNSUPPORTED: 400}

_ANTHROPIC_STATUS: Final = {**_COHERE_STATUS, Code.UNAVAILABLE: 529}


def _refuse_cohere(exchange: HttpExchange, error: ConchError, status: int = 0) -> None:
    status = status or _COHERE_STATUS[error.code]
    exchange.respond(status, [JSON, RETRY] if status == 503 else [JSON], errors.cohere_body(error))


def _refuse_anthropic(exchange: HttpExchange, error: ConchError, status: int = 0) -> None:
    status = status or _ANTHROPIC_STATUS[error.code]
    headers = [JSON, RETRY] if status in (503, 529) else [JSON]
    exchange.respond(status, headers, anthropic_errors.error_body(status, error))


def _refuse_tei(exchange: HttpExchange, error: ConchError, status: int = 0) -> None:
    kind, own = errors.tei_error(error)
    status = status or own
    headers = [JSON, RETRY] if status in (429, 503) else [JSON]
    exchange.respond(status, headers, errors.tei_body(error, kind))


KSERVE: Final = Dialect(kserve_status.refuse, 403)
OPENAI: Final = Dialect(openai_status.refuse, 401, b"X-Request-Id", b"OpenAI-Processing-Ms")
ANTHROPIC: Final = Dialect(_refuse_anthropic, 401, b"request-id")
COHERE: Final = Dialect(_refuse_cohere, 401, b"X-Request-Id")
TEI: Final = Dialect(_refuse_tei, 401, b"X-Request-Id")


def refuse(exchange: HttpExchange, error: ConchError, status: int = 0) -> None:
    """Respond with an error in the dialect of the exchange."""
    (exchange.dialect or KSERVE).refuse(exchange, error, status)
