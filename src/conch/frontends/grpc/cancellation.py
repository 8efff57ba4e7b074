"""Cancels the requests of a call whose client has disconnected, with the lines of Triton's verbose log."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from conch.core.inference import InferRequest
from conch.machine import logs

#: Triton's names of the kinds of calls.
Handler = Literal["ModelInferHandler", "ModelStreamInferHandler"]
#: The function of each kind that handles a response.
_TAKES_RESPONSE = {
    "ModelInferHandler": "ModelInferHandler::InferResponseComplete",
    "ModelStreamInferHandler": "ModelStreamInferHandler::StreamInferResponseComplete",
}


def cancel_requests(handler: Handler, requests: Collection[InferRequest]) -> None:
    """Cancel the in-flight requests of a call."""
    first = next((request.serial for request in requests), 0)
    if first:
        logs.verbose(1, "Cancellation notification received for %s", _state(handler, first, "ISSUED"))
    for request in requests:
        logs.verbose(1, "Issuing cancellation for %d", request.serial)
        request.cancel()


def log_early_cancellation(handler: Handler) -> None:
    """Log the cancellation of a call that has no request yet: its message is being decoded, or its model loaded."""
    logs.verbose(1, "Cancellation notification received for %s", _state(handler, 0, "START"))
    logs.verbose(1, "Completing cancellation for %s", _state(handler, 0, "START"))


def log_skipped_response(handler: Handler, serial: int, *, final: bool) -> None:
    """Log that the response of a cancelled request is not sent; the ``final`` one ends its cancellation."""
    where = f"{_TAKES_RESPONSE[handler]}, {serial}"
    logs.verbose(1, "%s, skipping response generation as grpc transaction was cancelled... ", where)
    if final:
        logs.verbose(1, "Completing cancellation for %s", _state(handler, serial, "CANCELLED"))


def _state(handler: Handler, serial: int, step: str) -> str:
    return f"{handler}, rpc_ok=1, context 0, {serial} step {step}"
