"""The error objects of Anthropic's API."""

from __future__ import annotations

from typing import Any, Final

from conch.core.errors import ConchError, clipped
from conch.wire.json import text

#: The ``type`` of errors by HTTP status; other 4xx are ``invalid_request_error``, other 5xx ``api_error``.
_TYPES: Final = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error",
}  # fmt: skip


def error_object(status: int, error: ConchError) -> dict[str, Any]:
    """Return the object of an error, also of one that ends a stream; ``status`` is that of HTTP."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = text.string(text.utf8(clipped(error.public)))
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_body(status: int, error: ConchError) -> bytes:
    """Return the body of an error response."""
    return text.dumps(error_object(status, error))
