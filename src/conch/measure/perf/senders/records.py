"""The record of a request: a row of integers, from which all figures are computed.

The sending processes (:mod:`conch.measure.perf.senders.load`) write the records. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray


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
    """Requests in flight or waiting: their number, and the due time of the first (ns, 0 without any)."""

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
