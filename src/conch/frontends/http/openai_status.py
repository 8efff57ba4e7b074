"""Errors of the OpenAI API: the HTTP status of each error code, and the error object.

The statuses are those of the KServe API, except that an unsupported request is 400: OpenAI's clients retry after any
status of 500 or higher.
"""

from __future__ import annotations

from typing import Final

from conch.core.errors import Code, ConchError
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.status import RETRY
from conch.frontends.http.status import STATUS as HTTP_STATUS
from conch.wire.openai.reading import error_body

STATUS: Final = {**HTTP_STATUS, Code.UNSUPPORTED: 400}


def refuse(exchange: HttpExchange, error: ConchError, status: int = 0) -> None:
    """Respond with an error; 503 includes ``Retry-After``. ``status`` overrides the status of the error's code."""
    status = status or STATUS[error.code]
    exchange.respond(status, [JSON, RETRY] if status == 503 else [JSON], error_body(status, error))
