"""Reads the response to one request as it arrives: HTTP/1.1 with server-sent events."""

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
        """Add ``data``; returns the events that it completes."""
        # Events with text have one line of data, in all these servers.
        lines = (self.rest + data).replace(b"\r\n", b"\n").split(b"\n")
        self.rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class Answer:
    """Collects events with their times from received bytes; decodes nothing before :meth:`record` is called."""

    def __init__(self, streams: bool) -> None:
        self.parser: Any = httptools.HttpResponseParser(self)
        self.events: Events | None = Events() if streams else None
        self.found: list[tuple[int, bytes]] = []
        self.body = b""
        self.now = 0
        self.complete = False

    def add(self, data: bytes, now: int) -> None:
        """Add bytes received at ``now`` (ns)."""
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
        """Return the error; empty if there is none."""
        if not self.complete:
            return f"the server hung up after {len(self.found)} events"
        status: int = self.parser.get_status_code()
        return "" if status == 200 else f"HTTP {status}: {self.body[:500].decode(errors='replace')}"


@dataclass(slots=True)
class Record:
    """One request: the times (ns) at which it was due, at which text arrived, and at which the response was complete.

    ``arrival`` marks requests of the open loop; ``counted`` is the number of tokens that the server reports, None if it
    reports none.
    """

    due: int
    end: int
    tokens: int
    arrival: bool = False
    counted: int | None = None
    text: str = ""
    times: Sequence[int] = field(default_factory=list)


def read(response: Answer, dialect: Dialect, *, due: int, tokens: int, arrival: bool) -> Record:
    """Read a response. Raises RuntimeError if it is an error."""
    if failure := response.failure():
        raise RuntimeError(failure)
    events, times, texts = [], [], []
    for moment, data in response.found:
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
    return Record(due, response.now, tokens, arrival, dialect.tokens(events), "".join(texts), times)
