"""An HTTP/1.1 channel with one request at a time, parsed by httptools.

Runs on the event loop of a sending process.
"""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import Any, Final

import httptools
import orjson

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
        self._parser: Any = None
        self._body = b""

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
        if call is None:  # no request is in flight
            self.close()
            return
        if not call.first:
            call.first = monotonic_ns()
        call.received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._call is call:
                self.close()
                self._end(call, Outcome.UNREADABLE, str(error))

    # Called by the parser

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() >= 300:
            self._body += body

    def on_message_complete(self) -> None:
        call, parser = self._call, self._parser
        code = parser.get_status_code()
        if code < 200 or call is None:  # 100 Continue
            return
        call.code = code
        if not parser.should_keep_alive():
            self.close()
        if code < 300:
            self._answered(call)
        else:
            self._end(call, Outcome.REFUSED, error_text(self._body) or f"HTTP status {code}")

    def _answered(self, call: TimedCall) -> None:
        """Complete a call whose response is not an error."""
        call.responses += 1
        self._end(call, Outcome.OK, "")

    def _write(self, call: TimedCall) -> None:
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
        self._json_size = 0

    # Called by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._json_size = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"inference-header-content-length":
            self._json_size = int(value)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def _answered(self, call: TimedCall) -> None:
        call.responses += 1
        end = monotonic_ns()
        wrong = self._judge(call.number, self._body, self._json_size)
        self._end(call, Outcome.WRONG if wrong else Outcome.OK, wrong, end)


def error_text(body: bytes) -> str:
    """Return the message of an error body: the JSON member ``error`` of Triton or the OpenAI API, or the whole body."""
    try:
        error = orjson.loads(body)["error"]
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace").strip()
    return text[:_SHOWN]
