"""An HTTP/1.1 channel with one request at a time.

Runs on the event loop of a sending process.
"""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import Final

import orjson

from conch.client.http1 import HttpFault, ResponseReader
from conch.measure.perf.senders.calls import Judge, TimedCall
from conch.measure.perf.senders.channels.connecting import Address, Connecting
from conch.measure.perf.senders.records import Outcome

#: Maximum length of an error message (characters).
_SHOWN: Final = 400


class HttpChannel(Connecting):
    """Sends prepared requests, and records when their responses begin and end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address) -> None:
        super().__init__(loop, address)
        self._call: TimedCall | None = None
        self._reader = ResponseReader()

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
        self._reader = ResponseReader()
        if self._call is not None:
            self._write(self._call)

    def on_lost(self, error: str) -> None:
        if self._call is not None:
            self._end(self._call, Outcome.CONNECTION_LOST, error)

    def resume_writing(self) -> None:
        if self._call is not None:
            self._call.written = monotonic_ns()

    def data_received(self, data: bytes) -> None:
        call, reader = self._call, self._reader
        if call is None:  # no request is in flight
            self.close()
            return
        if not call.first:
            call.first = monotonic_ns()
        call.received += len(data)
        try:
            complete = reader.feed(data)
        except HttpFault as fault:
            self.close()
            self._end(call, Outcome.UNREADABLE, str(fault))
            return
        if reader.status < 300:
            self._arrived(call, complete)
        if complete:
            call.code = reader.status
            if not reader.keep_alive:
                self.close()
            if reader.status < 300:
                self._complete(call)
            else:
                self._end(call, Outcome.REFUSED, error_text(reader.take_body()) or f"HTTP status {reader.status}")

    def _arrived(self, call: TimedCall, complete: bool) -> None:
        """Read the next part of a response that is not an error."""

    def _complete(self, call: TimedCall) -> None:
        """Complete a call whose response is not an error."""
        call.responses += 1
        self._end(call, Outcome.OK, "")

    def _write(self, call: TimedCall) -> None:
        self._reader.begin()
        call.sent = monotonic_ns()
        if self.write(call.payload.data):
            call.written = monotonic_ns()

    def _end(self, call: TimedCall, outcome: Outcome, error: str, end: int = 0) -> None:
        call.end = end or monotonic_ns()
        call.outcome = outcome
        call.error = error
        self._call = None
        call.on_end(call)


class JudgedHttpChannel(HttpChannel):
    """An HTTP channel that compares responses with the expected ones."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address, judge: Judge) -> None:
        super().__init__(loop, address)
        self._judge = judge

    def _complete(self, call: TimedCall) -> None:
        call.responses += 1
        end = monotonic_ns()
        response = self._reader.response()
        wrong = self._judge(call.number, response.body, response.json_size or 0)
        self._end(call, Outcome.WRONG if wrong else Outcome.OK, wrong, end)


def error_text(body: bytes) -> str:
    """Return the message of an error body: the JSON member ``error`` of Triton or the OpenAI API, or the whole body."""
    try:
        error = orjson.loads(body)["error"]
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace").strip()
    return text[:_SHOWN]
