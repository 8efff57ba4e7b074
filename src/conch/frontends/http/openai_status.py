"""Refusals of the OpenAI API: the HTTP status of each error code, and the error object.  Pure.

The statuses are those of the KServe API, except for what a model cannot do: this is the client's mistake here (400),
because OpenAI's clients retry after any status of 500 and above.
"""

from __future__ import annotations

from typing import Final

from conch.errors import Code, ConchError
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.status import RETRY
from conch.frontends.http.status import STATUS as HTTP_STATUS
from conch.wire.openai.errors import error_body

STATUS: Final = {**HTTP_STATUS, Code.UNSUPPORTED: 400}


def refuse(exchange: HttpExchange, error: ConchError, status: int = 0) -> None:
    """Answer with an error; 503 says when to try again.  ``status`` replaces that of the error's code."""
    status = status or STATUS[error.code]
    exchange.respond(status, [JSON, RETRY] if status == 503 else [JSON], error_body(status, error))
