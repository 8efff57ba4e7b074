"""Measures the stages of a request: one client, an identity model on BYTES.

    python -m benchmarks.layers [--protocol http|grpc] [--seconds 2]

Starts a server whose stages are wrapped with a clock (:mod:`benchmarks.clock`), sends it requests with
perf_analyzer at concurrency 1, and prints the median time between one stage and the next.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from benchmarks.clock import Moments, record_server
from benchmarks.serving import TEXT, TEXT_CONFIG, write_model
from benchmarks.windows import ask_perf_analyzer
from tests.oracle.run import free_ports, wait_until_ready

#: The work between the previous stage and this one.
STAGES: Final = {
    "read": "(the request's bytes are in the server)",
    "submitted": "server: parse HTTP or HTTP/2, decode, validate, enqueue",
    "batched": "server: one turn of the event loop, so that others can join the batch",
    "encoded": "server: form the batch, encode the frame",
    "sent": "kernel: write to the worker's socket and wake the worker",
    "answered": "worker: wake up, decode, execute, encode, write; server: wake up",
    "decoded": "server: read and decode the frame, statistics",
    "written": "server: encode the response; kernel: write to the client's socket and wake it",
}


def spans(requests: Sequence[Moments]) -> dict[str, list[float]]:
    """Return the µs from the previous stage to each stage, for all requests that have every stage in order."""
    durations: dict[str, list[float]] = {stage: [] for stage in list(STAGES)[1:]}
    for request in requests:
        moments = [request[stage] for stage in STAGES if stage in request]
        if len(moments) == len(STAGES) and moments == sorted(moments):
            for stage, (earlier, later) in zip(durations, pairwise(moments), strict=True):
                durations[stage].append((later - earlier) / 1000)
    return durations


def serve(protocol: str, arguments: list[str]) -> None:
    """Run the server with its stages measured; print the table when it ends."""
    from conch.cli import main

    recorder = record_server(protocol)
    try:
        main(arguments)
    except SystemExit:
        pass
    total = 0.0
    print("| stage | median µs |\n|---|---|")
    for stage, measured in spans(recorder.all).items():
        median = statistics.median(measured)
        total += median
        print(f"| {STAGES[stage]} | {median:.0f} |")
    print(f"| sum | {total:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", choices=["http", "grpc"], default="http")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of perf_analyzer's windows")
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
            wait_until_ready(f"127.0.0.1:{http}", server)
            port = http if options.protocol == "http" else grpc
            flags = ("-m", "text", "-i", options.protocol, "-u", f"127.0.0.1:{port}", *TEXT)
            _, latency = ask_perf_analyzer(*flags, seconds=options.seconds)
            print(f"{options.protocol}: the client sees {latency:.0f} µs on average", flush=True)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(10)


if __name__ == "__main__":
    main()
