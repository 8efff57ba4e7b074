"""Errors in the forms of Cohere and of TEI."""

from __future__ import annotations

from typing import Final

from conch.core.errors import QUEUE_FULL, Code, ConchError
from conch.wire.json import text
from conch.wire.openai.reading import ApiError
from conch.wire.retrieval.inputs import EMPTY, TOO_MANY

#: TEI's types of errors and their statuses, by error code. A model refuses texts that are too long as INVALID_ARG.
_TEI: Final = {
    Code.UNKNOWN: ("Backend", 424),
    Code.INTERNAL: ("Backend", 424),
    Code.NOT_FOUND: ("Validation", 404),
    Code.INVALID_ARG: ("Validation", 413),
    Code.UNAVAILABLE: ("Unhealthy", 503),
    Code.UNSUPPORTED: ("Backend", 424),
    Code.ALREADY_EXISTS: ("Validation", 422),
    Code.CANCELLED: ("Overloaded", 429),
}
#: The same for the reasons of errors in a request; other reasons are ``Validation`` with 422.
_TEI_REASONS: Final = {EMPTY: ("Empty", 400), TOO_MANY: ("Validation", 413)}


def cohere_body(status: int, error: ConchError) -> bytes:
    """Return the body of an error response of Cohere's API."""
    return text.dumps({"message": text.error_message(error.public)})


def tei_status(error: ConchError) -> int:
    """Return the HTTP status of an error of TEI."""
    return _tei(error)[1]


def tei_body(status: int, error: ConchError) -> bytes:
    """Return the body of an error response of TEI."""
    return text.dumps({"error": text.error_message(error.public), "error_type": _tei(error)[0]})


def _tei(error: ConchError) -> tuple[str, int]:
    if error.code is Code.INVALID_ARG and (isinstance(error, ApiError) or error.param is not None):
        return _TEI_REASONS.get(error.reason or "", ("Validation", 422))
    if error.code is Code.UNAVAILABLE and QUEUE_FULL in error.message:
        return "Overloaded", 429
    if error.code is Code.INVALID_ARG and "cannot be tokenised" in error.message:
        return "Tokenizer", 422
    return _TEI[error.code]
