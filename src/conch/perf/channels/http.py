"""A connection of HTTP/1.1 that carries one request at a time, parsed by httptools.

Runs on the event loop of a process that sends.
"""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import Any, Final

import httptools

from conch.perf.calls import TimedCall
from conch.perf.channels.connecting import Address, Connecting
from conch.perf.records import Outcome

#: How much of the body of an error is kept (bytes).
_SHOWN: Final = 400


class HttpChannel(Connecting):
    """Sends prepared requests, and notes when their answers begin and end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address) -> None:
        super().__init__(loop, address)
        self._call: TimedCall | None = None
        self._parser: Any = None
        self._data = b""

    @property
    def room(self) -> int:
        return 1 if self._call is None else 0

    def send(self, call: TimedCall) -> None:
        self._call = call
        call.channel = self
        if self.transport is None:
            call.sent = monotonic_ns()
            self.connect()
        else:
            self._write(call)

    def cancel(self, call: TimedCall) -> None:
        if call is self._call:
            self._call = None
            self.close()

    # Called by the transport

    def on_connected(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        if self._call is not None:
            self._write(self._call)

    def on_lost(self, error: str) -> None:
        self._parser = None
        if self._call is not None:
            self._end(self._call, Outcome.CONNECTION_LOST, error)

    def resume_writing(self) -> None:
        if self._call is not None:
            self._call.written = monotonic_ns()

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # nobody asked
            self.close()
            return
        if not call.first:
            call.first = monotonic_ns()
        call.received += len(data)
        self._data = data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._call is call:
                self.close()
                self._end(call, Outcome.UNREADABLE, str(error))

    # Called by the parser

    def on_message_complete(self) -> None:
        call, parser = self._call, self._parser
        code = parser.get_status_code()
        if code < 200 or call is None:  # 100 Continue
            return
        call.code = code
        call.responses += 1
        if not parser.should_keep_alive():
            self.close()
        if code < 300:
            self._end(call, Outcome.OK, "")
        else:
            shown = self._data.rpartition(b"\r\n\r\n")[2][:_SHOWN]
            self._end(call, Outcome.REFUSED, shown.decode("utf-8", "replace"))

    def _write(self, call: TimedCall) -> None:
        call.sent = monotonic_ns()
        if self.write(call.payload.data):
            call.written = monotonic_ns()

    def _end(self, call: TimedCall, outcome: Outcome, error: str) -> None:
        call.end = monotonic_ns()
        call.outcome = outcome
        call.error = error
        self._call = None
        call.on_end(call)
