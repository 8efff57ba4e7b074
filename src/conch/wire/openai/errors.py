"""OpenAI's error object, and errors that say which member of a request is wrong.

Raised by the modules of this package, written by the HTTP front end.
"""

from __future__ import annotations

from typing import Any, Final

from conch.errors import Code, ConchError, clipped
from conch.wire.json import text

#: The ``type`` of errors by HTTP status; other 4xx are ``invalid_request_error``.
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
#: Inputs of a model that have the value of a request's member of the same name.
_INPUTS: Final = ("messages", "tools")


class ApiError(ConchError):
    """``param`` is the member that is wrong (``messages[0].role``), ``reason`` OpenAI's ``code``."""

    def __init__(
        self, message: str, param: str | None = None, *, code: Code = Code.INVALID_ARG, reason: str | None = None
    ) -> None:
        super().__init__(message, code)
        self.param = param
        self.reason = reason


def error_object(status: int, message: str, param: str | None = None, reason: str | None = None) -> dict[str, Any]:
    """OpenAI's error object for an HTTP status."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    shown = text.string(text.utf8(clipped(message)))
    named = None if param is None else text.string(text.utf8(clipped(param)))
    return {"error": {"message": shown, "type": kind, "param": named, "code": reason}}


def error_body(status: int, error: ConchError) -> bytes:
    """The body of a failure, and the data of an event that ends a stream with one."""
    if isinstance(error, ApiError):
        param, reason = error.param, error.reason
    else:
        # Workers know inputs, of which these are named as the members that they come from.
        param, reason = next((name for name in _INPUTS if error.public.startswith(f"input '{name}' ")), None), None
    return text.dumps(error_object(status, error.public, param, reason))
