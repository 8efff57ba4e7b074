"""A timed request, the interface of the channels that carry it, and its record: a row of integers.

A load (:mod:`conch.measure.perf.senders.load`) reuses one ``TimedCall`` per concurrent request, and writes its record,
from which all figures are computed. A channel (:mod:`conch.measure.perf.senders.channels`) sends the request and sets
the timestamps. Loads and channels run on the event loop of a sending process.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from time import monotonic_ns
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from conch.measure.perf.requests.payload import Payload


class Outcome(IntEnum):
    """The result of a request.

    ``NONE``: not completed when its load was stopped. ``WRONG``: the response differs from the expected one.
    """

    OK = 0
    REFUSED = 1
    CONNECTION_LOST = 2
    TIMED_OUT = 3
    UNREADABLE = 4
    NONE = 5
    WRONG = 6


#: The columns. ``due``, ``sent``, ``written``, ``first`` and ``end`` are timestamps (ns, monotonic, 0 for never): the
#: scheduled start, the writes of the first and the last byte of the request to the kernel, and the reads of the first
#: and the last byte of the response. ``code`` is the HTTP or gRPC status, ``payload`` the number of the payload.
#: ``responses`` and ``received`` count messages and bytes of the response, ``tokens`` its tokens (0 if the server does
#: not return their number). ``slot`` is the caller, which has one request at a time.
COLUMNS: Final = (
    "due", "sent", "written", "first", "end", "outcome", "code", "payload", "responses", "tokens", "received", "slot",
)  # fmt: skip
RECORD: Final = np.dtype([(name, np.int64) for name in COLUMNS])
Records = NDArray[Any]
#: Start (exclusive) and end (inclusive) of a window (ns, monotonic).
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Requests in flight or waiting: their number, and the due time of the first (ns, 0 if none)."""

    count: int = 0
    first_due: int = 0


class RecordBuffer:
    """The records of a sending process, and the ``events`` within its requests.

    An event is the row of a request in this buffer and the timestamp of one of its messages (ns). Events are kept for
    requests with several messages.
    """

    def __init__(self) -> None:
        self.rows = array("q")
        self.events = array("q")
        self.count = 0

    def take(self) -> tuple[bytes, bytes]:
        """Remove and return the rows and events."""
        taken = self.rows.tobytes(), self.events.tobytes()
        self.rows = array("q")
        self.events = array("q")
        self.count = 0
        return taken


def read_records(rows: bytes) -> Records:
    """Return the rows of a buffer as a structured array ``[requests]`` with the fields ``COLUMNS``."""
    return np.frombuffer(rows, RECORD)


def read_events(events: bytes) -> NDArray[np.int64]:
    """Return the events of a buffer ``[messages, 2]``: row and timestamp (ns)."""
    return np.frombuffer(events, np.int64).reshape(-1, 2)


def join_events(parts: Iterable[tuple[Records, NDArray[np.int64]]]) -> NDArray[np.int64]:
    """Concatenate the events of several buffers, with rows counted over their concatenated records."""
    joined, first = [], 0
    for records, events in parts:
        joined.append(events + np.array([first, 0]))
        first += len(records)
    return np.concatenate(joined)


def ended_in(records: Records, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return a mask of the requests that ended in one of the windows."""
    inside = np.zeros(len(records), bool)
    for start, end in spans:
        inside |= (records["end"] > start) & (records["end"] <= end)
    return inside


def seconds_of(spans: Sequence[Span]) -> float:
    """Return the total length of the windows (s)."""
    return sum(end - start for start, end in spans) / 1e9


# A window ends before its records are collected; requests that complete during the collection belong to the next
# window, so that none is lost or counted twice.


@dataclass(frozen=True, slots=True)
class Collected:
    """The records of the sending processes since the last collection.

    ``records`` are completed requests. ``events`` ``[messages, 2]`` has the row and the timestamp (ns) of each message
    of requests with several messages. ``unfinished`` are requests in flight or waiting. ``errors`` counts errors by
    message. ``busy`` is the largest fraction of the time for which one process computed.
    """

    records: Records
    events: Any
    unfinished: Unfinished
    errors: dict[str, int]
    busy: float


class Recording:
    """The requests of a level, recorded from ``start`` on (ns, monotonic).

    Requests that were due before ``since`` (ns) are excluded: they belong to an earlier level.
    """

    def __init__(self, start: int, since: int = 0) -> None:
        self.errors: Counter[str] = Counter()
        self.unfinished = Unfinished()
        self._start = self._last_collection = start
        self._since = since
        #: For how long the busiest process computed (ns).
        self._computed = 0.0
        #: Collected records, with the time span in which their requests completed.
        self._parts: list[tuple[Span, Collected]] = []

    def add(self, collected: Collected, now: int) -> Records:
        """Add records that were collected at ``now`` (ns); return the requests that count.

        A process that hands over its records late may include requests from before the last collection.
        """
        ends = collected.records["end"]
        since = min(self._last_collection, int(ends.min())) if len(ends) else self._last_collection
        self._parts.append(((since, now), collected))
        self._computed += collected.busy * (now - self._last_collection)
        self._last_collection = now
        self.errors.update(collected.errors)
        self.unfinished = collected.unfinished
        return collected.records[collected.records["due"] >= self._since]

    @property
    def busy(self) -> float:
        """The fraction of the time for which the busiest process computed.

        An average over all collections: between two collections in quick succession, a process does nothing but reply.
        """
        seen = self._last_collection - self._start
        return self._computed / seen if seen > 0 else 0.0

    def within(self, spans: Sequence[Span]) -> tuple[Records, NDArray[np.int64]]:
        """Return the requests that completed in ``spans``, and their events by row."""
        parts = [
            (part.records, part.events)
            for (since, until), part in self._parts
            if any(start < until and since <= end for start, end in spans)  # the end of a window belongs to it
        ]
        parts.append((np.zeros(0, RECORD), np.zeros((0, 2), np.int64)))
        records, events = np.concatenate([records for records, _ in parts]), join_events(parts)
        inside = ended_in(records, spans) & (records["due"] >= self._since)
        rows = np.cumsum(inside) - 1
        events = events[inside[events[:, 0]]]
        return records[inside], np.column_stack([rows[events[:, 0]], events[:, 1]])


class TimedCall:
    """A request with the columns of its record; calls ``on_end`` when it ends."""

    __slots__ = (
        "channel", "code", "due", "end", "error", "events", "first", "number", "on_end", "outcome", "payload",
        "received", "responses", "sent", "slot", "tokens", "written",
    )  # fmt: skip

    def __init__(self, slot: int, on_end: Callable[[TimedCall], None]) -> None:
        self.slot = slot
        self.on_end = on_end
        self.channel: CallChannel | None = None
        self.payload = Payload(b"")
        self.number = 0
        #: Timestamps of the messages (ns), if there are several.
        self.events: list[int] = []
        self.begin(0)

    def begin(self, due: int) -> None:
        """Reset the call for a new request that is due at ``due`` (ns, monotonic)."""
        self.due = due
        self.sent = self.written = self.first = self.end = 0
        self.outcome: Outcome = Outcome.NONE
        self.code = self.responses = self.tokens = self.received = 0
        self.error = ""
        if self.events:
            self.events = []

    def finish(self, outcome: Outcome, error: str = "", code: int = 0, end: int = 0) -> None:
        """Set the result and the end time (ns, 0 for now), and call ``on_end``; the channel is then free."""
        self.end = end or monotonic_ns()
        self.outcome = outcome
        self.code = code
        self.error = error
        self.on_end(self)


#: Returns the difference of a response from the expected one; empty if there is none. Takes the number of the payload,
#: the response (an HTTP body or a gRPC message), and the size of the JSON part of a body, which precedes its tensors (0
#: if all of it is JSON).
Judge = Callable[[int, bytes, int], str]


class CallChannel(Protocol):
    """A connection that is established at its first use, and again after it was lost."""

    @property
    def room(self) -> int:
        """The number of further calls that the channel can carry at the same time."""

    def send(self, call: TimedCall) -> None:
        """Send ``call.payload``; ``call.on_end`` is called exactly once, never from within this method."""

    def cancel(self, call: TimedCall) -> None:
        """Cancel a call without a call of ``on_end``."""

    def close(self) -> None:
        """Close the connection; calls in flight are abandoned."""
