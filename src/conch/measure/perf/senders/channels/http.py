"""HTTP/1.1 channels with one request at a time, for whole responses and for event streams.

Run on the event loop of a sending process. Sources: HTML Living Standard, "Server-sent events"; Triton's generate
extension; OpenAI API reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final, NamedTuple

import orjson

from conch.client.http1 import HttpFault, ResponseReader
from conch.measure.perf.senders.channels.connecting import Address, Connecting
from conch.measure.perf.senders.records import Judge, Outcome, TimedCall

#: Maximum length of an error message (characters).
_SHOWN: Final = 400


class HttpChannel(Connecting):
    """Sends prepared requests, and records when their responses begin and end.

    ``judge`` validates responses; without it, their content is ignored.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address, judge: Judge | None = None) -> None:
        super().__init__(loop, address)
        self._judge = judge
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
        end, wrong = monotonic_ns(), ""
        if self._judge is not None:
            response = self._reader.response()
            wrong = self._judge(call.number, response.body, response.json_size or 0)
        self._end(call, Outcome.WRONG if wrong else Outcome.OK, wrong, end)

    def _write(self, call: TimedCall) -> None:
        self._reader.begin()
        call.sent = monotonic_ns()
        if self.write(call.payload.data):
            call.written = monotonic_ns()

    def _end(self, call: TimedCall, outcome: Outcome, error: str, end: int = 0) -> None:
        self._call = None
        call.finish(outcome, error, call.code, end)


def error_text(body: bytes) -> str:
    """Return the message of an error body: the JSON member ``error`` of Triton or the OpenAI API, or the whole body."""
    try:
        error = orjson.loads(body)["error"]
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace").strip()
    return text[:_SHOWN]


#: Members of generate responses that are not outputs.
_NO_OUTPUTS: Final = frozenset(("id", "model_name", "model_version", "sequence_id", "sequence_start", "sequence_end"))


class Event(NamedTuple):
    """A parsed event: whether it has text, the number of tokens of the whole response (0: unknown), and the error."""

    text: bool
    tokens: int = 0
    error: str = ""


ReadEvent = Callable[[bytes], Event]


class EventChannel(HttpChannel):
    """A channel that parses each event, or a whole response without events, with ``read``.

    Responses are those of ``generate_stream`` or the OpenAI API; the timestamp of each event with text is recorded.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address, read: ReadEvent) -> None:
        super().__init__(loop, address)
        self._read = read
        self._unread = b""
        self._error = ""

    def _write(self, call: TimedCall) -> None:
        self._unread, self._error = b"", ""
        super()._write(call)

    def _arrived(self, call: TimedCall, complete: bool) -> None:
        self._unread += self._reader.take_body()
        if self._reader.headers.get(b"content-type", b"").lower().startswith(b"text/event-stream"):
            *events, self._unread = self._unread.replace(b"\r\n", b"\n").split(b"\n\n")
            for event in [*events, self._unread] if complete else events:
                self._note(call, event)
        elif complete:
            self._understand(call, self._unread)

    def _complete(self, call: TimedCall) -> None:
        self._end(call, Outcome.REFUSED if self._error else Outcome.OK, self._error)

    def _note(self, call: TimedCall, event: bytes) -> None:
        data = b"\n".join([line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")])
        if data and data != b"[DONE]":
            self._understand(call, data)

    def _understand(self, call: TimedCall, data: bytes) -> None:
        try:
            event = self._read(data)
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError):
            event = Event(text=False, error=f"not understood: {data[:_SHOWN].decode('utf-8', 'replace')}")
        if event.error:
            self._error = event.error
        if event.text:
            call.responses += 1
            call.events.append(monotonic_ns())
        if event.tokens:
            call.tokens = event.tokens


def read_generate(data: bytes) -> Event:
    """Parse an event of ``generate_stream`` or a response of ``generate``: outputs by name, one of which has text."""
    document: dict[str, Any] = orjson.loads(data)
    if "error" in document:
        return Event(text=False, error=str(document["error"]))
    return Event(text=any(value not in ("", [], None) for name, value in document.items() if name not in _NO_OUTPUTS))


def read_openai(data: bytes) -> Event:
    """Parse a chat or text completion, or one of its chunks."""
    document: dict[str, Any] = orjson.loads(data)
    if (error := document.get("error")) is not None:
        return Event(text=False, error=str(error.get("message", error)))
    usage = document.get("usage") or {}
    tokens = int(usage.get("completion_tokens") or 0)
    for choice in document.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or choice
        if part.get("content") or part.get("text") or part.get("tool_calls") or part.get("reasoning_content"):
            return Event(text=True, tokens=tokens)
    return Event(text=False, tokens=tokens)
