"""The answer to one request as it comes in: HTTP/1.1, and server-sent events in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httptools

from benchmarks.generation.dialects import Dialect


class Events:
    """Splits a stream into the data of its server-sent events."""

    def __init__(self) -> None:
        self.rest = b""

    def add(self, data: bytes) -> list[bytes]:
        """The events that are complete with ``data``."""
        # An event that carries text has one line of data, in every server here.
        lines = (self.rest + data).replace(b"\r\n", b"\n").split(b"\n")
        self.rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class Answer:
    """Takes bytes and keeps events with their times; nothing is decoded before :meth:`record` is called."""

    def __init__(self, streams: bool) -> None:
        self.parser: Any = httptools.HttpResponseParser(self)
        self.events: Events | None = Events() if streams else None
        self.found: list[tuple[int, bytes]] = []
        self.body = b""
        self.now = 0
        self.complete = False

    def add(self, data: bytes, now: int) -> None:
        """Take what has come at ``now`` (ns)."""
        self.now = now
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        if self.events is None or self.parser.get_status_code() != 200:
            self.body += data
        else:
            self.found += [(self.now, event) for event in self.events.add(data)]

    def on_message_complete(self) -> None:
        self.complete = True
        if self.events is None:
            self.found = [(self.now, self.body)]

    def failure(self) -> str:
        """What is wrong, empty when nothing is."""
        if not self.complete:
            return f"the server hung up after {len(self.found)} events"
        status: int = self.parser.get_status_code()
        return "" if status == 200 else f"HTTP {status}: {self.body[:500].decode(errors='replace')}"


@dataclass(slots=True)
class Record:
    """One request: the moments (ns) at which it was due, at which text came and at which the answer was complete.

    ``arrival`` tells those of the open loop from those of the closed one; ``counted`` is what the server says of the
    tokens, None where it says nothing.
    """

    due: int
    end: int
    tokens: int
    arrival: bool = False
    counted: int | None = None
    text: str = ""
    times: Sequence[int] = field(default_factory=list)


def read(answer: Answer, dialect: Dialect, *, due: int, tokens: int, arrival: bool) -> Record:
    """What an answer says.  Raises RuntimeError for one that is an error."""
    if failure := answer.failure():
        raise RuntimeError(failure)
    events, times, texts = [], [], []
    for moment, data in answer.found:
        if data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise RuntimeError(f"the server says: {event['error']}")
        events.append(event)
        if text := dialect.text(event):
            times.append(moment)
            texts.append(text)
    if not times:
        raise RuntimeError("an answer without text")
    return Record(due, answer.now, tokens, arrival, dialect.tokens(events), "".join(texts), times)
