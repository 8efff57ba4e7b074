"""Tracks prepared requests: requests that a worker decodes while they wait in the queue.

Owned by a ``WorkerProcess``; runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from conch.core.errors import ConchError
from conch.core.inference import Holder, InferRequest
from conch.workers.child.packing import Packer
from conch.workers.host.execution import description


class Preparation:
    """Sends waiting requests to the worker for decoding and records their lengths; ``send`` writes a frame to it."""

    def __init__(self, send: Callable[[dict[str, Any], Packer | None], None]) -> None:
        self._send = send
        self._requests: dict[int, InferRequest] = {}

    def add(self, requests: Sequence[InferRequest], holder: Holder) -> None:
        """Send requests for decoding; ``holder`` is told to drop a request that ends before it runs."""
        packer = Packer()
        described = [description(request, packer) for request in requests]
        try:
            self._send({"op": "prepare", "requests": described}, packer)
        except (ConchError, OSError):  # no shared memory now: they are sent with their execution, or fail there
            return
        for request in requests:
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
