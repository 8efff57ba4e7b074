"""Measures every stage of a request in client, server and worker: one client, one text of 16 tokens.

    python -m benchmarks.direct [--converted FOLDER] [--variants NAME ...] [--seconds 5]

Client, server and worker run as usual, with their stages wrapped by a shared clock (``CLOCK_MONOTONIC``,
:mod:`benchmarks.clock`). Each records its times, which are then merged.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks import converted, load
from benchmarks.clock import Moments, Recorder, record_server
from benchmarks.peers.servers import python_path
from benchmarks.texts import SENTENCE
from conch.backends.tasks.huggingface_backend import HuggingFaceBackend
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.workers.child.channel import Channel, Header
from tests.servers import ConchServer

_FOLDER: Final = "CONCH_BENCHMARK_MOMENTS"

#: From the previous stage to this one: where it is recorded, its name, the process that works, and its work.
STAGES: Final = (
    ("client", "asked", "", ""),
    ("server", "read", "client, kernel", "write to the socket; the server wakes up and reads"),
    ("server", "submitted", "HTTP", "parse the request, decode, validate, enqueue"),
    ("server", "batched", "scheduler", "one turn of the event loop, so that others can join"),
    ("server", "encoded", "channel", "form the batch, encode the frame"),
    ("worker", "received", "channel, kernel", "write to the worker; it wakes up, reads and decodes the frame"),
    ("worker", "tokenising", "worker", "create the request's tensors"),
    ("worker", "tokenised", "tokenise", "text to token ids"),
    ("worker", "started", "worker", "plan the runs, make the arrays"),
    ("worker", "computed", "engine", "the network"),
    ("worker", "pooled", "pooling", "mean over tokens, length 1"),
    ("worker", "packed", "worker", "the result, and its frame's header"),
    ("server", "answered", "channel, kernel", "encode and write the frame; the server wakes up"),
    ("server", "decoded", "channel", "read and decode the frame; statistics"),
    ("client", "received", "HTTP, kernel", "encode the response, write; the client wakes up and reads"),
)


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
        self.recorder.end()

    def stop(self) -> None:
        super().stop()
        write(self.recorder, "worker")


def open_measured(channel: Channel, init: Header) -> MeasuredBackend:
    """Create the backend; called by the worker."""
    options = Options.from_config(json.loads(init["config"]))
    return MeasuredBackend(channel, init, Checkpoint.open(Path(init["model"]["version_directory"]), options))


def write(recorder: Recorder, who: str) -> None:
    """Write the recorded times for the process that started the server."""
    (Path(os.environ[_FOLDER]) / f"{who}.json").write_text(json.dumps(recorder.all))


def serve(arguments: list[str]) -> None:
    """Run the server with its stages measured."""
    from conch.backends.table import BACKENDS, Backend
    from conch.cli import main

    BACKENDS["measured"] = Backend("benchmarks.direct:open_measured", shared=True, prepares=True)
    recorder = record_server()
    try:
        main(arguments)
    except SystemExit:
        pass
    write(recorder, "server")


def measure(folder: Path, variant: str, seconds: float) -> tuple[list[tuple[str, str, float]], float]:
    """Return the stages (process, work, median µs), in order, and the client's median latency (µs)."""
    with tempfile.TemporaryDirectory() as home:
        repository = Path(home) / "models"
        converted.serve(repository, folder, [variant], backend="measured")
        server = ConchServer(repository, "--log-info=false", env={"PYTHONPATH": python_path(), _FOLDER: home})
        server.command = [sys.executable, "-m", "benchmarks.direct", "--serve", *server.command[1:]]
        with server:
            target = load.Target(server.http, variant, "text_input", "embedding")
            seen = load.measure(target, [SENTENCE], 1, seconds=seconds, moments=True)
        recorded = {who: json.loads((Path(home) / f"{who}.json").read_text()) for who in ("server", "worker")}
    recorded["client"] = [{"asked": sent, "received": received} for sent, received in seen.moments]
    requests = [request for record in recorded["client"] if (request := together(record, recorded))]
    if not requests:
        raise RuntimeError("no request could be followed through all stages")
    stages = []
    for (before_in, before, _, _), (where, name, who, what) in pairwise(STAGES):
        spans = [request[where][name] - request[before_in][before] for request in requests]
        stages.append((who, what, statistics.median(spans) / 1000))
    return stages, seen.median


def together(client: Moments, recorded: Mapping[str, Sequence[Moments]]) -> dict[str, Moments] | None:
    """Return the records of server and worker between a client's request and its response; None if incomplete."""
    moments = {"client": client}
    for who, first in (("server", "read"), ("worker", "received")):
        starts = [record.get(first, 0) for record in recorded[who]]
        at = bisect_left(starts, client["asked"])
        if at == len(starts) or starts[at] > client["received"]:
            return None
        moments[who] = recorded[who][at]
    complete = all(name in moments[where] for where, name, _, _ in STAGES)
    return moments if complete else None


def table(stages: Sequence[tuple[str, str, float]], seen: float) -> str:
    """Return the stages as a Markdown table."""
    lines = ["| layer | stage | median µs |", "|---|---|---|"]
    lines += [f"| {who} | {what} | {median:.0f} |" for who, what, median in stages]
    total = sum(median for _, _, median in stages)
    return "\n".join([*lines, f"| sum | (the client's median: {seen:.0f} µs) | {total:.0f} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    converted.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a measurement")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    with converted.folder(options.converted) as folder:
        for name in converted.chosen(folder, options.variants):
            print(f"One client, one text of 16 tokens, {name}:\n")
            print(table(*measure(folder, name, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
