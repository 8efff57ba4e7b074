"""Where the time of one request goes: one client, identity on BYTES, stage by stage.

    python -m benchmarks.layers [--protocol http|grpc]

Starts a server whose stages are wrapped with a clock, lets perf_analyzer ask it at concurrency 1 and
prints the median time between one stage and the next.  The clock itself costs about half a
microsecond a stage.
"""

from __future__ import annotations

import argparse
import functools
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.serving import TEXT, TEXT_CONFIG, write_model
from tests.oracle import perf_analyzer
from tests.oracle.run import free_ports, wait_until_ready

#: What is measured: from the stage before to this one.
STAGES = {
    "read": "(the request's bytes are in the server)",
    "submitted": "server: parse HTTP or HTTP/2, decode, validate, enqueue",
    "batched": "server: one turn of the event loop, so that others can join the batch",
    "encoded": "server: form the batch, encode the frame",
    "sent": "kernel: write to the worker's socket and wake the worker",
    "answered": "worker: wake up, decode, execute, encode, write; server: wake up",
    "decoded": "server: read and decode the frame, statistics",
    "written": "server: encode the response; kernel: write to the client's socket and wake it",
}


class Probe:
    """The moments of the request that is under way."""

    def __init__(self) -> None:
        self.moments: dict[str, float] = {}
        self.spans: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def mark(self, stage: str) -> None:
        self.moments[stage] = time.perf_counter()

    def around(self, owner: Any, name: str, before: str = "", after: str = "", end: bool = False) -> None:
        """Mark a stage when a method is entered or left; ``end`` closes the request."""
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def measured(*arguments: Any, **options: Any) -> Any:
            if before:
                self.mark(before)
            result = method(*arguments, **options)
            if after:
                self.mark(after)
            if end:
                self.close()
            return result

        setattr(owner, name, measured)

    def close(self) -> None:
        moments = [self.moments.get(stage) for stage in STAGES]
        if None not in moments and moments == sorted(moments):
            for stage, earlier, later in zip(list(STAGES)[1:], moments, moments[1:], strict=False):
                self.spans[stage].append((later - earlier) * 1e6)
        self.moments.clear()


def serve(protocol: str, arguments: list[str]) -> None:
    """The server with its stages measured; prints the table when it ends."""
    from conch.cli import main
    from conch.frontends.grpc.http2.connection import Http2Connection
    from conch.frontends.http.connection import HttpConnection
    from conch.server.dispatch import Dispatcher
    from conch.server.model import Model
    from conch.workers.host.link import Link

    probe = Probe()
    front = HttpConnection if protocol == "http" else Http2Connection
    probe.around(front, "data_received", before="read")
    probe.around(Model, "infer", after="submitted")
    probe.around(Dispatcher, "_ask", before="batched")
    probe.around(Link, "send", before="encoded", after="sent")
    probe.around(Link, "_readable", before="answered", after="written", end=True)
    probe.around(Model, "_ended", after="decoded")
    try:
        main(arguments)
    except SystemExit:
        pass
    total = 0.0
    print("| stage | median µs |\n|---|---|")
    for stage, what in list(STAGES.items())[1:]:
        median = statistics.median(probe.spans[stage])
        total += median
        print(f"| {what} | {median:.0f} |")
    print(f"| sum | {total:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", choices=["http", "grpc"], default="http")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.protocol, options.serve)
        return
    with tempfile.TemporaryDirectory() as home:
        write_model(Path(home), "text", TEXT_CONFIG)
        http, grpc, metrics = free_ports(3)
        command = [sys.executable, "-m", "benchmarks.layers", "--protocol", options.protocol, "--serve", "serve"]
        command += [f"--model-repository={home}", f"--http-port={http}", f"--grpc-port={grpc}"]
        command += [f"--metrics-port={metrics}", "--log-info=false"]
        server = subprocess.Popen(command)
        try:
            wait_until_ready(f"127.0.0.1:{http}", server)  # type: ignore[arg-type]
            port = http if options.protocol == "http" else grpc
            done = perf_analyzer(
                "-m", "text", "-i", options.protocol, "-u", f"127.0.0.1:{port}", *TEXT, "-p", "2000", "-s", "900"
            )
            found = re.search(r"latency (\d+) usec", done.stdout)
            print(f"{options.protocol}: the client sees {found[1] if found else '?'} µs on average", flush=True)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(10)


if __name__ == "__main__":
    main()
