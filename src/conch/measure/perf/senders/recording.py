"""The records of a level, by the times at which they were collected.

Pure. A window ends before its records are collected; requests that complete during the collection belong to the next
window, so that none is lost or counted twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conch.measure.perf.senders.records import RECORD, Records, Span, Unfinished, ended_in, join_events


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
        self._start = self._asked = start
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
        since = min(self._asked, int(ends.min())) if len(ends) else self._asked
        self._parts.append(((since, now), collected))
        self._computed += collected.busy * (now - self._asked)
        self._asked = now
        self.errors.update(collected.errors)
        self.unfinished = collected.unfinished
        return collected.records[collected.records["due"] >= self._since]

    @property
    def busy(self) -> float:
        """The fraction of the time for which the busiest process computed.

        An average over all collections: between two collections in quick succession, a process does nothing but reply.
        """
        seen = self._asked - self._start
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
