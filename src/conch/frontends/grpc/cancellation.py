"""Cancels the requests of a call whose client has gone, with the lines that Triton's verbose log has for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from conch import logs
from conch.inference import InferRequest


def cancel_requests(
    handler: Literal["ModelInferHandler", "ModelStreamInferHandler"], requests: Collection[InferRequest]
) -> None:
    """Cancel the requests that a call has under way; ``handler`` is Triton's name of the kind of call."""
    first = next((request.serial for request in requests), 0)
    state = f"{handler}, rpc_ok=1, context 0, {first} step"
    if first:
        logs.verbose(1, "Cancellation notification received for %s ISSUED", state)
    for request in requests:
        logs.verbose(1, "Issuing cancellation for %d", request.serial)
        request.cancel()
    if first:
        logs.verbose(1, "Completing cancellation for %s CANCELLED", state)
