"""Batches that run in a worker, and the conversion of requests and responses to and from frames.

Used by ``WorkerProcess`` on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest, InferResponse
from conch.workers.child.packing import Packer, Unpacker


@dataclass(slots=True)
class Execution:
    """A batch that runs in a worker.

    ``times`` are the compute input, infer and output durations (ns). ``work`` holds the counts of a built-in backend by
    name (``tokens``, ``padded`` …). ``rescheduled`` are the requests that the model rescheduled.
    """

    requests: Sequence[InferRequest]
    on_done: Callable[[Execution], None]
    started: int = field(default_factory=time.monotonic_ns)
    times: tuple[int, int, int] = (0, 0, 0)
    work: dict[str, int] = field(default_factory=dict)
    error: ConchError | None = None
    rescheduled: Sequence[InferRequest] = ()


def description(request: InferRequest, packer: Packer) -> dict[str, Any]:
    """Return the fields that describe a request in a frame, with any trace context; adds its tensors to ``packer``."""
    fields = {
        "serial": request.serial,
        "id": request.id,
        "correlation_id": request.correlation_id,
        "flags": request.flags,
        "timeout": request.timeout,
        "parameters": request.parameters,
        "outputs": request.outputs,
        "inputs": packer.pack(list(request.inputs.values())),
    }
    if request.shared is not None:
        loans = request.shared.loans()
        if loans:
            fields["places"] = {name: packer.offer(loan) for name, loan in loans.items()}
    if request.trace is not None:
        fields["trace"] = request.trace.context
    return fields


def response_of(
    header: dict[str, Any], unpacker: Unpacker, final: bool, request: InferRequest | None = None
) -> InferResponse:
    """Return the response that a frame, or an entry of a frame, describes.

    Outputs that ``request`` wants in shared memory regions are written there; the others have their own memory.
    """
    error = header.get("error")
    return InferResponse(
        unpacker.unpack(header.get("outputs") or (), None if request is None else request.shared),
        error=None if error is None else ConchError(error[1], Code[error[0]]),
        final=final,
        parameters=header.get("parameters"),
    )


def responses_of(
    headers: Sequence[dict[str, Any] | None], unpacker: Unpacker, requests: Sequence[InferRequest]
) -> list[InferResponse | None]:
    """Return the responses at the end of a batch, one per request; None for requests with separate responses."""
    return [
        None if header is None else response_of(header, unpacker, True, request)
        for header, request in zip(headers, requests, strict=True)
    ]


def take_times(request: InferRequest, times: tuple[int, int, int]) -> None:
    """Store the compute input, infer and output durations (ns) of the batch of ``request``."""
    request.times.compute_input, request.times.compute_infer, request.times.compute_output = times
