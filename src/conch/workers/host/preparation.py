"""The requests that a worker has decoded and that wait to run, as the server's side of the worker keeps them.

Belongs to a ``WorkerProcess``; on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from conch.errors import ConchError
from conch.inference import Holder, InferRequest
from conch.workers.child.packing import Packer
from conch.workers.host.execution import description


class Preparation:
    """Sends requests to be decoded, by frames that ``send`` writes to the worker, and notes what came of it."""

    def __init__(self, send: Callable[[dict[str, Any], Packer | None], None]) -> None:
        self._send = send
        self._requests: dict[int, InferRequest] = {}

    def add(self, requests: Sequence[InferRequest], holder: Holder) -> None:
        """Have requests decoded; ``holder`` is told when one ends before it runs."""
        packer = Packer()
        described = [description(request, packer) for request in requests]
        try:
            self._send({"op": "prepare", "requests": described}, packer)
        except (ConchError, OSError):  # no memory to share now: they go with their execution, or fail there
            return
        for request in requests:
            self._requests[request.serial] = request
            request.holder = holder

    def take(self, request: InferRequest) -> bool:
        """Whether the worker has the request, which runs now."""
        return self._requests.pop(request.serial, None) is not None

    def drop(self, request: InferRequest) -> None:
        """Have the worker forget a request that will not run there."""
        if self.take(request):
            self._send({"op": "drop", "serial": request.serial}, None)

    def note_lengths(self, lengths: Sequence[Sequence[int]]) -> None:
        """Note of each request, by its serial number, its length and its sequences."""
        for serial, length, sequences in lengths:
            request = self._requests.get(serial)
            if request is not None:
                request.length, request.sequences = length, sequences

    def clear(self) -> None:
        """Forget all; the worker has ended."""
        self._requests.clear()
