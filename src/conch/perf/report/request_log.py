"""A line of JSON for each request, written as windows end, in a thread: the senders do not wait for it.

Moments are nanoseconds since the measurement began, null where the request never came so far.  docs/reports.md has the
members.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from conch.perf.senders.recording import Collected
from conch.perf.senders.records import COLUMNS, Outcome, Records

_MOMENTS: Final = ("due", "sent", "written", "first", "end")
_OUTCOMES: Final = {int(outcome): outcome.name.lower() for outcome in Outcome}


class RequestLog:
    """The file at ``path``, which is emptied; lines are written by a thread until it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._start = monotonic_ns()
        self._todo: queue.SimpleQueue[tuple[dict[str, float], Collected] | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._write, name="request log", daemon=True)
        self._thread.start()

    def add(self, level: dict[str, float], collected: Collected) -> None:
        """Have the requests written, each with the members of ``level``."""
        self._todo.put((level, collected))

    def close(self) -> None:
        """Write what is left.  Raises OSError for what could not be written, as on a full disk."""
        self._todo.put(None)
        self._thread.join()
        self._file.close()
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        while (todo := self._todo.get()) is not None:
            level, collected = todo
            try:
                if self._error is None:
                    self._file.writelines(lines(level, collected.records, collected.events, self._start))
                    self._file.flush()
            except OSError as error:
                self._error = error


def lines(level: dict[str, float], records: Records, events: NDArray[np.int64], start: int) -> Iterator[bytes]:
    """The requests in lines; ``events`` are by row of ``records``, ``start`` is the moment 0 (ns)."""
    order = np.argsort(events[:, 0], kind="stable")
    rows, moments = events[order, 0], events[order, 1] - start
    begins = np.searchsorted(rows, np.arange(len(records) + 1)).tolist()
    for number, row in enumerate(records.tolist()):
        request: dict[str, Any] = {**level, **dict(zip(COLUMNS, row, strict=True))}
        for name in _MOMENTS:
            request[name] = request[name] - start if request[name] else None
        request["outcome"] = _OUTCOMES[request["outcome"]]
        if begins[number] < begins[number + 1]:
            request["events"] = moments[begins[number] : begins[number + 1]].tolist()
        yield orjson.dumps(request) + b"\n"
