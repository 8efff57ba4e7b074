"""Compares the results and the cost of ``conch perf`` and perf_analyzer: one server, measured by both tools in turns.

    python -m benchmarks.agreement [--rounds 3] [--seconds 2] [--server conch|triton] [--model-ms 5]

A row shows the medians over the rounds of the throughput and of the median latency from each tool, the median of the
ratios within each round, and how many requests per second each tool sends with one core.

The model waits for ``--model-ms`` for each batch of up to 16, like a model on an accelerator. With 0 it does nothing,
and the results differ only by the time that the tools take themselves, and by the cores that they take from the server.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.serving import MODEL, TEXT_CONFIG
from tests.oracle import TritonServer, install
from tests.oracle.install import library_path
from tests.servers import ConchServer

LEVELS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a tool: inferences per second, the median latency (µs), and the cores that the tool used."""

    throughput: float
    median: float
    cores: float


@dataclass
class Level:
    """One row: the results of both tools by round."""

    protocol: str
    concurrency: int
    conch: list[Found] = field(default_factory=list)
    peer: list[Found] = field(default_factory=list)

    def row(self) -> str:
        cells = [f"| {self.protocol} | {self.concurrency} "]
        for figure in ("throughput", "median"):
            ours, theirs = ([getattr(sample, figure) for sample in runs] for runs in (self.conch, self.peer))
            ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
            cells.append(f"| {statistics.median(ours):.0f} | {statistics.median(theirs):.0f} ")
            cells.append(f"| **{statistics.median(ratios):.3f}** | {min(ratios):.2f}–{max(ratios):.2f} ")
        per_core = (
            statistics.median(sample.throughput / sample.cores for sample in runs) for runs in (self.conch, self.peer)
        )
        cells += [f"| {rate:.0f} " for rate in per_core]
        return "".join(cells) + "|"


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> float:
    """Run a tool to its end; returns the cores that it and its processes used in the second half of the time.

    Raises RuntimeError, with its output, if it fails.
    """
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process:
            tool = psutil.Process(process.pid)
            readings: list[tuple[float, float]] = []
            while process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    readings.append((time.monotonic(), _seconds(tool)))
                time.sleep(0.1)
        output.seek(0)
        if process.returncode or len(readings) < 4:
            raise RuntimeError(f"{' '.join(command)}: {output.read()[-1000:]}")
    # The first half is for starting and warming up; the usage of processes is no longer available when they have ended.
    start, before = readings[len(readings) // 2]
    end, after = max(readings, key=lambda reading: reading[1])
    return (after - before) / (end - start)


def _seconds(tool: psutil.Process) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in [tool, *tool.children(recursive=True)])


def ask_conch(address: str, protocol: str, concurrency: int, seconds: float) -> Found:
    """Return the result of ``conch perf``."""
    with tempfile.TemporaryDirectory() as home:
        report = Path(home) / "report.json"
        cores = run([
            sys.executable, "-m", "conch", "perf", *_arguments(address, protocol, concurrency, seconds),
            "--no-sender-limit", "--json", str(report),
        ])  # fmt: skip
        (level,) = json.loads(report.read_text())["levels"]
    return Found(level["throughput"], level["latency"]["percentiles"]["50"] * 1e6, cores)


def ask_peer(address: str, protocol: str, concurrency: int, seconds: float) -> Found:
    """Return the result of perf_analyzer."""
    oracle = install()
    with tempfile.TemporaryDirectory() as home:
        report = Path(home) / "report.csv"
        cores = run(
            [str(oracle.perf_analyzer), *_arguments(address, protocol, concurrency, seconds), "-f", str(report)],
            {"LD_LIBRARY_PATH": library_path(oracle)},
        )
        (level,) = csv.DictReader(report.read_text().splitlines())
    return Found(float(level["Inferences/Second"]), float(level["p50 latency"]), cores)


def _arguments(address: str, protocol: str, concurrency: int, seconds: float) -> list[str]:
    return [
        "-m", "text", "-u", address, "-i", protocol, "--concurrency-range", str(concurrency),
        "--string-data", "some text", "--shape", "INPUT0:1", "-p", str(int(seconds * 1000)), "-s", "900", "-r", "4",
    ]  # fmt: skip


@contextlib.contextmanager
def server(name: str, model_ms: float) -> Iterator[ConchServer | TritonServer]:
    with tempfile.TemporaryDirectory() as home:
        code = Path(home) / "text" / "1" / "model.py"
        code.parent.mkdir(parents=True)
        wait = f"        time.sleep({model_ms / 1000})\n" if model_ms else ""
        line = "        responses = []\n"
        code.write_text("import time\n\n" + MODEL.replace(line, wait + line))
        (Path(home) / "text" / "config.pbtxt").write_text(TEXT_CONFIG)
        with (ConchServer if name == "conch" else TritonServer)(Path(home)) as running:
            yield running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one window, of which there are three")
    parser.add_argument("--server", choices=["conch", "triton"], default="conch")
    parser.add_argument("--model-ms", type=float, default=5.0)
    parser.add_argument("--levels", type=int, nargs="*", default=LEVELS)
    parser.add_argument("--protocols", nargs="*", default=["http", "grpc"])
    options = parser.parse_args()

    levels = [Level(protocol, concurrency) for protocol in options.protocols for concurrency in options.levels]
    with server(options.server, options.model_ms) as running:
        for number in range(options.rounds):
            for level in levels:
                address = running.http if level.protocol == "http" else running.grpc
                tools: list[tuple[list[Found], Callable[..., Found]]]
                tools = [(level.conch, ask_conch), (level.peer, ask_peer)]
                for runs, ask in tools if number % 2 == 0 else reversed(tools):
                    runs.append(ask(address, level.protocol, level.concurrency, options.seconds))
                print(f"round {number + 1}: {level.row()}", file=sys.stderr, flush=True)

    print(
        "| protocol | concurrency | conch perf infer/s | perf_analyzer | ratio | range "
        "| conch perf p50 µs | perf_analyzer | ratio | range | conch perf infer/s per core | perf_analyzer |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for level in levels:
        print(level.row())


if __name__ == "__main__":
    main()
