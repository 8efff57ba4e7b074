"""An HTTP/1.1 channel for responses that are event streams, from ``generate_stream`` or the OpenAI API.

The timestamp of each event with text is recorded. Sources: HTML Living Standard, "Server-sent events"; Triton's
generate extension; OpenAI API reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final, NamedTuple

import orjson

from conch.measure.perf.senders.calls import TimedCall
from conch.measure.perf.senders.channels.connecting import Address
from conch.measure.perf.senders.channels.http import HttpChannel
from conch.measure.perf.senders.records import Outcome

_SHOWN: Final = 400
#: Members of generate responses that are not outputs.
_NO_OUTPUTS: Final = frozenset(("id", "model_name", "model_version", "sequence_id", "sequence_start", "sequence_end"))


class Event(NamedTuple):
    """A parsed event: whether it has text, the number of tokens of the whole response (0: unknown), and the error."""

    text: bool
    tokens: int = 0
    error: str = ""


ReadEvent = Callable[[bytes], Event]


class EventChannel(HttpChannel):
    """A channel that parses each event, or a whole response without events, with ``read``."""

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
