"""OpenAI's error object, and errors that name the invalid member of a request.

Raised by the modules of this package, written by the HTTP front end.
"""

from __future__ import annotations

from typing import Any, Final

from conch.core.errors import Code, ConchError, clipped
from conch.wire.json import text

#: The ``type`` of errors by HTTP status; other 4xx are ``invalid_request_error``.
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
#: Model inputs whose value is the request member of the same name.
_INPUTS: Final = ("messages", "tools")


class ApiError(ConchError):
    """An OpenAI API error: ``param`` is the invalid member (``messages[0].role``), ``reason`` OpenAI's ``code``."""

    def __init__(
        self, message: str, param: str | None = None, *, code: Code = Code.INVALID_ARG, reason: str | None = None
    ) -> None:
        super().__init__(message, code)
        self.param = param
        self.reason = reason


def error_object(status: int, message: str, param: str | None = None, reason: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object for an HTTP status."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    shown = text.string(text.utf8(clipped(message)))
    named = None if param is None else text.string(text.utf8(clipped(param)))
    return {"error": {"message": shown, "type": kind, "param": named, "code": reason}}


def error_body(status: int, error: ConchError) -> bytes:
    """Return the body of an error response, also used as the data of an event that ends a stream."""
    if isinstance(error, ApiError):
        param, reason = error.param, error.reason
    elif error.code is Code.NOT_FOUND:  # only models are looked up
        param, reason = "model", "model_not_found"
    else:
        # Workers report input names; these inputs have the names of request members.
        param, reason = next((name for name in _INPUTS if error.public.startswith(f"input '{name}' ")), None), None
    return text.dumps(error_object(status, error.public, param, reason))
