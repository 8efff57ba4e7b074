"""What is noted of every request: a row of integers, from which all figures follow.

Written by the processes that send (:mod:`conch.perf.senders.load`), read where figures are made; pure.
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
    """How a request ended; ``NONE`` is one that had not ended when its load was stopped, ``WRONG`` one that got another
    answer than the one that is known to be right."""

    OK = 0
    REFUSED = 1
    CONNECTION_LOST = 2
    TIMED_OUT = 3
    UNREADABLE = 4
    NONE = 5
    WRONG = 6


#: The columns.  ``due``, ``sent``, ``written``, ``first`` and ``end`` are moments (ns, monotonic, 0 for never): when
#: the request should have started, when its first and its last byte were given to the kernel, when the first byte of
#: the answer was read, and the last.  ``code`` is the status of HTTP or gRPC, ``payload`` the number of what was sent,
#: ``responses`` and ``received`` count what came (messages, bytes), ``tokens`` those of the answer where the server
#: says so (0: it does not), ``slot`` is the caller, which has one request at a time.
COLUMNS: Final = (
    "due", "sent", "written", "first", "end", "outcome", "code", "payload", "responses", "tokens", "received", "slot",
)  # fmt: skip
RECORD: Final = np.dtype([(name, np.int64) for name in COLUMNS])
Records = NDArray[Any]
#: The beginning and the end of a window (ns, monotonic); what ends at its end belongs to it.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Requests that run or wait: how many, and when the first of them was due (ns, 0 without any)."""

    count: int = 0
    first_due: int = 0


class RecordBuffer:
    """Rows as they are added, in the process that sends; ``events`` are moments within requests.

    A row of events is the number of the request's row (of this buffer) and the moment of one of its messages (ns); they
    are kept for requests that get more than one.
    """

    def __init__(self) -> None:
        self.rows = array("q")
        self.events = array("q")
        self.count = 0

    def take(self) -> tuple[bytes, bytes]:
        """The rows and events so far, which are forgotten."""
        taken = self.rows.tobytes(), self.events.tobytes()
        self.rows = array("q")
        self.events = array("q")
        self.count = 0
        return taken


def read_records(rows: bytes) -> Records:
    """The rows of a buffer as a structured array ``[requests]``, whose fields are ``COLUMNS``."""
    return np.frombuffer(rows, RECORD)


def read_events(events: bytes) -> NDArray[np.int64]:
    """The events of a buffer ``[messages, 2]``: the number of the row, and the moment (ns)."""
    return np.frombuffer(events, np.int64).reshape(-1, 2)


def join_events(parts: Iterable[tuple[Records, NDArray[np.int64]]]) -> NDArray[np.int64]:
    """The events of several buffers, by the rows of their records one behind the other."""
    joined, first = [], 0
    for records, events in parts:
        joined.append(events + np.array([first, 0]))
        first += len(records)
    return np.concatenate(joined)


def ended_in(records: Records, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Which requests ended in one of the windows."""
    inside = np.zeros(len(records), bool)
    for start, end in spans:
        inside |= (records["end"] > start) & (records["end"] <= end)
    return inside


def seconds_of(spans: Sequence[Span]) -> float:
    """How long windows are together (s)."""
    return sum(end - start for start, end in spans) / 1e9
