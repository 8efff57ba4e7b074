"""Where each microsecond goes: one client, one text of 16 tokens, client, server and worker stage by stage.

    python -m benchmarks.direct FOLDER VARIANT [--seconds 5]

Client, server and worker run as always, with their stages wrapped by one clock that they share
(``CLOCK_MONOTONIC``); each writes down its moments, which are put together by time.  The clock costs about
half a microsecond a stage.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

from benchmarks import converted, load
from benchmarks.peers.servers import ROOT
from benchmarks.texts import SENTENCE
from conch.backends.tasks.backend import HuggingFaceBackend
from conch.workers.child.channel import Header
from tests.servers import ConchServer

_FOLDER: Final = "CONCH_BENCHMARK_MOMENTS"

#: From the stage before to this one: where it is recorded, its name, who works, and what on.
STAGES: Final = (
    ("client", "asked", "", ""),
    ("server", "read", "client, kernel", "write to the socket; the server wakes up and reads"),
    ("server", "submitted", "HTTP", "parse the request, decode, validate, enqueue"),
    ("server", "batched", "scheduler", "one turn of the event loop, so that others can join"),
    ("server", "encoded", "channel", "form the batch, encode the frame"),
    ("worker", "received", "channel, kernel", "write to the worker; it wakes up, reads and decodes the frame"),
    ("worker", "tokenising", "worker", "make the request's tensors"),
    ("worker", "tokenised", "tokenise", "text to token ids"),
    ("worker", "started", "worker", "plan the runs, make the arrays"),
    ("worker", "computed", "engine", "the network"),
    ("worker", "pooled", "pooling", "mean over tokens, length 1"),
    ("worker", "packed", "worker", "the result, and its frame's header"),
    ("server", "answered", "channel, kernel", "encode and write the frame; the server wakes up"),
    ("server", "decoded", "channel", "read and decode the frame; statistics"),
    ("client", "received", "HTTP, kernel", "encode the response, write; the client wakes up and reads"),
)

Moments = dict[str, int]


class Recorder:
    """The moments of the request that is under way, and those of all before it."""

    def __init__(self) -> None:
        self.moments: Moments = {}
        self.all: list[Moments] = []

    def mark(self, stage: str) -> None:
        self.moments[stage] = perf_counter_ns()

    def around(self, owner: Any, name: str, before: str = "", after: str = "", end: bool = False) -> None:
        """Mark a stage when a function is entered or left; ``end`` closes the request."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def measured(*arguments: Any, **options: Any) -> Any:
            if before:
                self.mark(before)
            result = function(*arguments, **options)
            if after:
                self.mark(after)
            if end:
                self.all.append(self.moments)
                self.moments = {}
            return result

        setattr(owner, name, measured)

    def write(self, who: str) -> None:
        """Leave what was recorded for the parent."""
        (Path(os.environ[_FOLDER]) / f"{who}.json").write_text(json.dumps(self.all))


class MeasuredBackend(HuggingFaceBackend):
    """The backend with its stages measured; runs in the worker."""

    def load(self, instance: Mapping[str, Any]) -> None:
        super().load(instance)
        self.recorder = Recorder()
        task: Any = self._task
        self.recorder.around(task, "prepare", before="tokenising", after="tokenised")
        self.recorder.around(task.engine, "run", before="started", after="computed")
        self.recorder.around(task, "extract", after="pooled")
        self.recorder.around(self.channel, "send", before="packed")

    def execute(self, header: Header, payload: bytearray) -> None:
        self.recorder.mark("received")
        super().execute(header, payload)
        self.recorder.all.append(self.recorder.moments)
        self.recorder.moments = {}

    def close(self) -> None:
        self.recorder.write("worker")
        super().close()


def serve(arguments: list[str]) -> None:
    """The server with its stages measured."""
    from conch.backends.table import BACKENDS, Backend
    from conch.cli import main
    from conch.frontends.http.connection import HttpConnection
    from conch.server.dispatch import Dispatcher
    from conch.server.model import Model
    from conch.workers.host.link import Link

    BACKENDS["measured"] = Backend("benchmarks.direct:MeasuredBackend", shared=True, prepares=True)
    recorder = Recorder()
    recorder.around(HttpConnection, "data_received", before="read")
    recorder.around(Model, "infer", after="submitted")
    recorder.around(Dispatcher, "_ask", before="batched")
    recorder.around(Link, "send", before="encoded")
    recorder.around(Link, "_readable", before="answered", end=True)
    recorder.around(Model, "_ended", after="decoded")
    try:
        main(arguments)
    except SystemExit:
        pass
    recorder.write("server")


def measure(folder: Path, variant: str, seconds: float) -> tuple[list[tuple[str, str, float]], float]:
    """Stages (who, what, median µs), in order, and the median that the client sees (µs)."""
    with tempfile.TemporaryDirectory() as home:
        repository = Path(home) / "models"
        converted.serve(repository, folder, [variant], backend="measured")
        server = ConchServer(repository, "--log-info=false", env={"PYTHONPATH": str(ROOT), _FOLDER: home})
        server.command = [sys.executable, "-m", "benchmarks.direct", "--serve", *server.command[1:]]
        with server:
            target = load.Target(server.http, variant, "text_input", "embedding")
            seen = load.measure(target, [SENTENCE], 1, seconds=seconds, moments=True)
        recorded = {who: json.loads((Path(home) / f"{who}.json").read_text()) for who in ("server", "worker")}
    recorded["client"] = [{"asked": asked, "received": received} for asked, received in seen.moments]
    requests = [request for one in recorded["client"] if (request := together(one, recorded))]
    if not requests:
        raise RuntimeError("no request could be followed through all stages")
    stages = []
    for (before_in, before, _, _), (where, name, who, what) in pairwise(STAGES):
        spans = [one[where][name] - one[before_in][before] for one in requests]
        stages.append((who, what, statistics.median(spans) / 1000))
    return stages, seen.median


def together(client: Moments, recorded: Mapping[str, Sequence[Moments]]) -> dict[str, Moments] | None:
    """What server and worker recorded between a client's question and its answer; None unless it is complete."""
    found = {"client": client}
    for who, first in (("server", "read"), ("worker", "received")):
        begun = [one.get(first, 0) for one in recorded[who]]
        at = bisect_left(begun, client["asked"])
        if at == len(begun) or begun[at] > client["received"]:
            return None
        found[who] = recorded[who][at]
    complete = all(name in found[where] for where, name, _, _ in STAGES)
    return found if complete else None


def table(stages: Sequence[tuple[str, str, float]], seen: float) -> str:
    """The stages as a Markdown table."""
    lines = ["| layer | stage | median µs |", "|---|---|---|"]
    lines += [f"| {who} | {what} | {median:.0f} |" for who, what, median in stages]
    total = sum(median for _, _, median in stages)
    return "\n".join([*lines, f"| sum | (the client's median: {seen:.0f} µs) | {total:.0f} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("variant", nargs="?")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    print(table(*measure(options.folder, options.variant, options.seconds)))


if __name__ == "__main__":
    main()
