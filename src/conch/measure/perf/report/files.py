"""The output files of a measurement: CSV in perf_analyzer's columns, JSON, JSON Lines and HTML.

The command line names them; they are checked before the measurement begins.
"""

from __future__ import annotations

import queue
import re
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from conch import __version__
from conch.core.errors import internal, invalid
from conch.measure.perf.figures import average_of
from conch.measure.perf.measured import LevelDistributions, Measured, server_of
from conch.measure.perf.plan import PerfPlan
from conch.measure.perf.report.page import report
from conch.measure.perf.senders.records import COLUMNS, Collected, Outcome, Records
from conch.measure.perf.server.statistics import SERVER_STAGES
from conch.measure.reports.files import check_files, check_reports, write_report, write_whole
from conch.measure.reports.report import Cell, Table
from conch.measure.reports.text import csv_text, json_text

#: The version of the JSON format; incremented by changes that break existing readers.
FORMAT: Final = 1
_MOMENTS: Final = ("due", "sent", "written", "first", "end")
_OUTCOMES: Final = {int(outcome): outcome.name.lower() for outcome in Outcome}
#: Headers and parameters that contain secrets.
_SECRET: Final = re.compile(
    r"(?i)((?:authorization|cookie|[\w-]*(?:api-?key|token|secret|password))\s*[:=]\s*).+", re.DOTALL
)


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

    def __init__(self, files: OutputFiles, plan: PerfPlan) -> None:
        files.check()
        self._files = files
        #: The plan, which keeps the records if the HTML report needs them.
        self.plan = replace(plan, keep_records=True) if files.html is not None else plan
        self._distributions: list[LevelDistributions] = []
        self._log = RequestLog(files.jsonl) if files.jsonl is not None else None

    def on_collected(self, level: float, collected: Collected) -> None:
        """Log completed requests."""
        if self._log is not None:
            name = "request_rate" if self.plan.rates is not None else "concurrency"
            self._log.add({name: int(level) if level == int(level) else level}, collected)

    def take(self, measured: Measured) -> Measured:
        """Add a measured level; return it without its records, which are no longer needed."""
        self._distributions.append(LevelDistributions.of(measured.records, text=measured.generation is not None))
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
        files, plan = self._files, self.plan
        if self._log is not None and files.jsonl is not None:
            yield files.jsonl, self._log.close
        if not measured:
            return
        if (csv := files.csv) is not None:
            yield csv, lambda: write_whole(csv, csv_of(plan, measured, verbose=files.verbose).encode())
        if (json := files.json) is not None:
            yield json, lambda: write_whole(json, json_of(plan, measured).encode())
        if (html := files.html) is not None:
            yield html, lambda: write_report(report(plan, opening, command, measured, self._distributions), html)


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


def command_line(arguments: Sequence[str]) -> str:
    """Return ``conch`` with the arguments of this process; the values of secret headers are replaced by ``...``."""
    return shlex.join(["conch", *(_SECRET.sub(r"\1...", argument) for argument in arguments[1:])])


def csv_of(plan: PerfPlan, measured: Sequence[Measured], *, verbose: bool = False) -> str:
    """Return perf_analyzer's CSV columns: microseconds, a row per level; ``verbose`` adds those of --verbose-csv."""
    headings = [
        "Request Rate" if plan.rates is not None else "Concurrency", "Inferences/Second", "Client Send",
        "Network+Server Send/Recv", "Server Queue", "Server Compute Input", "Server Compute Infer",
        "Server Compute Output", "Client Recv", *(f"p{number:g} latency" for number in plan.percentiles),
    ]  # fmt: skip
    if verbose:
        # Without a percentile, the average is the latency that must be stable, and has its own column.
        headings += [*([] if plan.percentile else ["Avg latency"]), "request/response", "response wait"]
    return csv_text(Table.of(headings, (_row(plan, measurement, verbose=verbose) for measurement in measured)))


def _row(plan: PerfPlan, measured: Measured, *, verbose: bool) -> list[Cell]:
    figures, latency, server = measured.figures, measured.figures.latency, server_of(plan, measured)
    stages = server.stages if server is not None else {}
    counted = [_us(stages[name].average) if name in stages else 0 for name in SERVER_STAGES]
    send, wait, receive = (_us(average_of(stage)) for stage in (figures.send, figures.wait, figures.receive))
    row: list[Cell] = [
        f"{measured.level:g}", f"{figures.throughput:g}", send, max(0, wait - sum(counted)), *counted, receive,
        *(_us(latency.percentiles[number]) if latency else 0 for number in plan.percentiles),
    ]  # fmt: skip
    if verbose:
        average = [] if plan.percentile else [_us(average_of(latency))]
        row += [*average, send + receive, wait]
    return row


def json_of(plan: PerfPlan, measured: Sequence[Measured]) -> str:
    """Return the whole measurement as JSON, with times in seconds; docs/reports.md describes the members."""
    document = {
        "format": FORMAT,
        "conch": __version__,
        "model": plan.model,
        "protocol": plan.protocol,
        "url": plan.address.shown,
        "batch_size": plan.batch_size,
        "sent": measured[0].sent if measured else "",
        "levels": [_level(plan, measurement) for measurement in measured],
    }
    return json_text(document)


def _level(plan: PerfPlan, measured: Measured) -> dict[str, Any]:
    figures = asdict(measured.figures)
    figures["failures"] = {outcome.name.lower(): count for outcome, count in measured.figures.failures.items()}
    return {
        "request_rate" if plan.rates is not None else "concurrency": measured.level,
        **figures,
        **({"generation": asdict(measured.generation)} if measured.generation is not None else {}),
        "stable": measured.stable,
        "windows": [window.throughput for window in measured.windows],
        "server": [asdict(version) for version in measured.server],
        "errors": measured.errors,
        "sender_busy": round(measured.busy, 3),
        "unfinished": measured.unfinished,
        **_conditions(measured),
        "warnings": list(measured.warnings),
    }


def _conditions(measured: Measured) -> dict[str, Any]:
    """Return the conditions and the confidence of a measurement."""
    machine = measured.machine
    return {
        "confidence": asdict(measured.confidence) if measured.confidence is not None else None,
        "runs": [run.throughput for run in measured.runs],
        "resources": asdict(measured.resources) if measured.resources is not None else None,
        "metrics": {name: asdict(metric) for name, metric in measured.metrics.items()},
        "sender_limit": measured.limit,
        "disturbed": measured.disturbed,
        "machine": None if machine is None else asdict(machine),
        "gone": measured.gone,
        "stopped": measured.stopped,
    }


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


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
    """Yield the requests as JSON lines; ``events`` are by row of ``records``, ``start`` is time 0 (ns).

    Times are in nanoseconds, null for steps that the request did not reach. docs/reports.md describes the members.
    """
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
