"""The output files of a measurement as the command line names them, checked before the measurement begins."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from conch.core.errors import internal, invalid
from conch.measure.perf.measured import Measured
from conch.measure.perf.plan import PerfPlan
from conch.measure.perf.report import files
from conch.measure.perf.report.distributions import LevelDistributions
from conch.measure.perf.report.page import page
from conch.measure.perf.senders.records import COLUMNS, Collected, Outcome, Records
from conch.measure.reports.writing import check_files, check_reports, write_page, write_whole

# Times are nanoseconds since the start of the measurement, null for steps that the request did not reach.
# docs/reports.md describes the members.


_MOMENTS: Final = ("due", "sent", "written", "first", "end")
_OUTCOMES: Final = {int(outcome): outcome.name.lower() for outcome in Outcome}


class RequestLog:
    """The JSON Lines file at ``path``, which is truncated; a thread writes the lines until it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._start = monotonic_ns()
        self._todo: queue.SimpleQueue[tuple[dict[str, float], Collected] | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._write, name="request log", daemon=True)
        self._thread.start()

    def add(self, level: dict[str, float], collected: Collected) -> None:
        """Write the requests, each with the members of ``level``, in the background."""
        self._todo.put((level, collected))

    def close(self) -> None:
        """Write the remaining lines; raises OSError for lines that could not be written, as on a full disk."""
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
    """Yield the requests as JSON lines; ``events`` are by row of ``records``, ``start`` is time 0 (ns)."""
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


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """The paths of the output files, None for files that are not written; ``verbose`` adds columns to the CSV file."""

    csv: Path | None = None
    json: Path | None = None
    jsonl: Path | None = None
    html: Path | None = None
    verbose: bool = False

    def check(self, *, compares: bool = False) -> None:
        """Raise INVALID_ARG for files that cannot be written, and UNSUPPORTED if the extra ``report`` is missing.

        With ``compares``, CSV and JSON Lines are refused: perf_analyzer has no columns for ratios.
        """
        for flag, path in (("-f", self.csv), ("--jsonl", self.jsonl)):
            if compares and path is not None:
                raise invalid(f"{flag} {path}: a comparison with --against is written by --json and --html")
        flags: dict[Path, str] = {}
        for flag, path in (("-f", self.csv), ("--json", self.json), ("--jsonl", self.jsonl), ("--html", self.html)):
            if path is not None and (path.is_file() or not path.exists()):
                first = flags.setdefault(path.resolve(), flag)
                if first != flag:
                    raise invalid(f"{flag} {path}: {first} is written to that file")
        check_files({"-f": self.csv, "--json": self.json, "--jsonl": self.jsonl})
        check_reports({"--html": self.html})


class Outputs:
    """Receives the levels as they are measured, and writes the files at the end, even after an error."""

    def __init__(self, wanted: OutputFiles, plan: PerfPlan) -> None:
        wanted.check()
        self._wanted = wanted
        #: The plan, which keeps the records if the HTML report needs them.
        self.plan = replace(plan, keep_records=True) if wanted.html is not None else plan
        self._distributions: list[LevelDistributions | None] = []
        self._log = RequestLog(wanted.jsonl) if wanted.jsonl is not None else None

    def on_collected(self, level: float, collected: Collected) -> None:
        """Log completed requests."""
        if self._log is not None:
            name = "request_rate" if self.plan.rates is not None else "concurrency"
            self._log.add({name: int(level) if level == int(level) else level}, collected)

    def take(self, measured: Measured) -> Measured:
        """Add a measured level; return it without its records, which are no longer needed."""
        records = measured.records
        self._distributions.append(
            LevelDistributions.of(records, text=measured.generation is not None) if records is not None else None
        )
        return replace(measured, records=None)

    def write(self, opening: str, command: str, measured: Sequence[Measured]) -> None:
        """Write the files of the levels ``measured`` so far.

        ``opening`` describes the server, model and requests; ``command`` reproduces the measurement. Raises INTERNAL
        for files that cannot be written, as on a full disk, after all others are written.
        """
        write_all(self._writers(opening, command, measured))

    def _writers(
        self, opening: str, command: str, measured: Sequence[Measured]
    ) -> Iterator[tuple[Path, Callable[[], None]]]:
        """Yield the writer of each file; without levels, only the request log is written."""
        wanted, plan = self._wanted, self.plan
        if self._log is not None and wanted.jsonl is not None:
            yield wanted.jsonl, self._log.close
        if not measured:
            return
        if (csv := wanted.csv) is not None:
            yield csv, lambda: write_whole(csv, files.csv(plan, measured, verbose=wanted.verbose).encode())
        if (json := wanted.json) is not None:
            yield json, lambda: write_whole(json, files.json(plan, measured).encode())
        if (html := wanted.html) is not None:
            yield html, lambda: write_page(page(plan, opening, command, measured, self._distributions), html)


def write_all(writers: Iterable[tuple[Path, Callable[[], None]]]) -> None:
    """Write every file that can be written, then raise INTERNAL for the others, as on a full disk."""
    problems = []
    for path, write in writers:
        try:
            write()
        except OSError as error:
            problems.append(f"{path} cannot be written: {error.strerror or error}")
    if problems:
        raise internal("; ".join(problems))
