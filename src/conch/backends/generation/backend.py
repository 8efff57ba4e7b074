"""Backends over an engine: requests go to it one by one, and join the batch that it is computing.

Runs in workers: two threads read frames, and the service has one of its own.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from time import monotonic_ns
from typing import Final

from conch.backends.generation.engine import GenerationEngine
from conch.backends.generation.job import Job, ResponseBuilder
from conch.backends.generation.service import GenerationService
from conch.backends.native.arrays import Request
from conch.backends.native.backend import NativeBackend
from conch.errors import cancelled
from conch.workers.child.borrowing import BorrowingUnpacker
from conch.workers.child.channel import Channel, Header

#: Bytes of a request that takes long to read.
LONG: Final = 1 << 16


class GenerationBackend(NativeBackend):
    """One language model on one device: the thread that reads frames checks and encodes, another runs the engine.

    While one reads a long text, another goes on with frames, which may be about the same request.  ``slots`` is how
    many requests the server may give it at a time.
    """

    slots: int
    _service: GenerationService

    def __init__(self, channel: Channel, init: Header) -> None:
        super().__init__(channel, init)
        self.threads = 2
        self._under_way = threading.Lock()
        self._given_up: dict[int, bool] = {}  # of requests that are being read
        # A server's log has no room for progress bars and advice to whoever writes programs.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    @abstractmethod
    def reply(self, request: Request) -> ResponseBuilder:
        """What a request wants.  Raises INVALID_ARG or UNSUPPORTED with one sentence for what it cannot have."""

    def serve(self, engine: GenerationEngine, *, reserve: bool) -> None:
        """Start the thread that runs ``engine``."""
        self.slots = engine.max_sequences
        self._service = GenerationService(engine, self.channel, self.pack, reserve=reserve, arriving=self._arriving)
        self._service.start()

    def execute(self, header: Header, payload: bytearray) -> None:
        unpacker = BorrowingUnpacker(payload, self.channel)
        (fields,) = header["requests"]
        request = self.receive(fields, unpacker)
        serial = request.serial
        self._given_up[serial] = False
        if request.size > LONG:
            self.before_computing()
        try:
            reply = self.reply(request)
        except BaseException:
            with self._under_way:
                del self._given_up[serial]
            raise
        job = Job(
            request,
            header["batch"],
            reply,
            arrived=fields.get("arrived") or monotonic_ns(),
            priority=fields.get("priority", 0),
            deadline=fields.get("deadline", 0),
        )
        with self._under_way:
            if self._given_up.pop(serial):
                raise cancelled("Request was cancelled")
            self._service.submit(job)

    def cancel(self, serial: int) -> None:
        with self._under_way:
            if serial in self._given_up:
                self._given_up[serial] = True
            else:
                self._service.cancel(serial)

    def stop(self) -> None:
        if hasattr(self, "_service"):
            self._service.stop()

    def _arriving(self) -> bool:
        return bool(self._given_up) or self.channel.pending()
