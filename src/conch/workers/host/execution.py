"""Batches that run in a worker, prepared requests, and the conversion of both to and from frames.

A prepared request is one that the worker decodes while it waits in the queue. Used by ``WorkerProcess`` on the event
loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from conch.core.errors import Code, ConchError
from conch.core.inference import Holder, InferRequest, InferResponse
from conch.workers.child.packing import Packer, Unpacker


@dataclass(slots=True)
class Execution:
    """A batch that runs in a worker.

    ``times`` are the compute input, infer and output durations (ns). ``work`` holds the counts of a built-in backend by
    name (``tokens``, ``padded`` …). ``rescheduled`` are the requests that the model rescheduled,
    ``unfinished`` those that the worker has not completed and continues when it gets them again.
    """

    requests: Sequence[InferRequest]
    on_done: Callable[[Execution], None]
    started: int = field(default_factory=time.monotonic_ns)
    times: tuple[int, int, int] = (0, 0, 0)
    work: dict[str, int] = field(default_factory=dict)
    error: ConchError | None = None
    rescheduled: Sequence[InferRequest] = ()
    unfinished: Sequence[InferRequest] = ()


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
            fields["loans"] = {name: packer.offer(loan) for name, loan in loans.items()}
    if request.on_text is not None:
        fields["preview"] = True
    if request.trace is not None:
        fields["trace"] = request.trace.context
    return fields


def error_of(code: str, message: str, param: str | None = None, reason: str | None = None) -> ConchError:
    """Return the error of a request that a frame describes."""
    return ConchError(message, Code[code], param=param, reason=reason)


def response_of(
    header: dict[str, Any], unpacker: Unpacker, final: bool, request: InferRequest | None = None
) -> InferResponse:
    """Return the response that a frame, or an entry of a frame, describes.

    Outputs that ``request`` assigns to shared memory regions are written there; the others have their own memory.
    """
    error = header.get("error")
    return InferResponse(
        unpacker.unpack(header.get("outputs") or (), None if request is None else request.shared),
        error=None if error is None else error_of(*error),
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
    """Add the compute input, infer and output durations (ns) of a batch to those of ``request``."""
    request.times.compute_input += times[0]
    request.times.compute_infer += times[1]
    request.times.compute_output += times[2]


class Preparation:
    """Sends waiting requests to the worker for decoding and records their lengths; ``send`` writes a frame to it."""

    def __init__(self, send: Callable[[dict[str, Any], Packer | None], None]) -> None:
        self._send = send
        self._requests: dict[int, InferRequest] = {}

    def add(self, requests: Sequence[InferRequest], holder: Holder) -> None:
        """Send requests for decoding; ``holder`` is notified to drop a request that ends before it runs."""
        packer = Packer()
        described = [description(request, packer) for request in requests]
        try:
            self._send({"op": "prepare", "requests": described}, packer)
        except (ConchError, OSError):  # no shared memory now: they are sent with their execution, or fail there
            return
        for request in requests:
            self.keep(request, holder)

    def keep(self, request: InferRequest, holder: Holder) -> None:
        """Record that the worker has a request, which runs later."""
        self._requests[request.serial] = request
        request.holder = holder

    def take(self, request: InferRequest) -> bool:
        """Remove a request that runs now; return whether the worker has it."""
        return self._requests.pop(request.serial, None) is not None

    def drop(self, request: InferRequest) -> None:
        """Tell the worker to drop a request that will not run there."""
        if self.take(request):
            self._send({"op": "drop", "serial": request.serial}, None)

    def note_lengths(self, lengths: Sequence[Sequence[int]]) -> None:
        """Store the decoded lengths: serial number, longest sequence and number of sequences of each request."""
        for serial, length, sequences in lengths:
            request = self._requests.get(serial)
            if request is not None:
                request.length, request.sequences = length, sequences

    def clear(self) -> None:
        """Forget all requests because the worker has ended."""
        self._requests.clear()
