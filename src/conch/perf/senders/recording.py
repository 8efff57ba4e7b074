"""What the senders noted while a level was measured, by the moments at which they were asked.

Pure.  A window ends before the senders are asked what happened in it, so that what ends while they answer is in the
next one, and nothing is lost or counted twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conch.perf.senders.records import RECORD, Records, Span, Unfinished, ended_in, join_events


@dataclass(frozen=True, slots=True)
class Collected:
    """What the processes that send have noted since they were asked before.

    ``records`` are those of requests that have ended, ``events`` ``[messages, 2]`` the row and the moment (ns) of each
    message of those with several; ``unfinished`` are the requests that run or wait.  ``errors`` counts messages;
    ``busy`` is the largest share of its time for which a process computed.
    """

    records: Records
    events: Any
    unfinished: Unfinished
    errors: dict[str, int]
    busy: float


class Recording:
    """Collects what the senders noted from the moment ``start`` on (ns, monotonic).

    Requests that were due before ``since`` (ns) are none of it: they are of another level, which they outlived.
    """

    def __init__(self, start: int, since: int = 0) -> None:
        self.errors: Counter[str] = Counter()
        self.unfinished = Unfinished()
        self._start = self._asked = start
        self._since = since
        #: For how long the busiest process computed (ns).
        self._computed = 0.0
        #: With the moments between which their requests ended.
        self._parts: list[tuple[Span, Collected]] = []

    def add(self, collected: Collected, now: int) -> Records:
        """Note what was collected, all of which had ended at ``now`` (ns); returns the requests that count.

        What one process hands over late may have ended long before the others were asked.
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
        """The share of its time for which the busiest process computed.

        On average: it is asked often, and between two questions that follow at once it does nothing but answer.
        """
        seen = self._asked - self._start
        return self._computed / seen if seen > 0 else 0.0

    def within(self, spans: Sequence[Span]) -> tuple[Records, NDArray[np.int64]]:
        """The requests that ended in ``spans``, and their events by row."""
        parts = [
            (one.records, one.events)
            for (since, until), one in self._parts
            if any(start < until and since <= end for start, end in spans)  # what ends with a window is in it
        ]
        parts.append((np.zeros(0, RECORD), np.zeros((0, 2), np.int64)))
        records, events = np.concatenate([records for records, _ in parts]), join_events(parts)
        inside = ended_in(records, spans) & (records["due"] >= self._since)
        rows = np.cumsum(inside) - 1
        events = events[inside[events[:, 0]]]
        return records[inside], np.column_stack([rows[events[:, 0]], events[:, 1]])
