"""Compares a network alone with the same network in the server, in turns, to measure the cost of serving.

    python -m benchmarks.inside [--converted FOLDER] [--variants NAME ...] [--shapes 1x16 ...] [--seconds 0.5]
                                [--rounds 6] [--flag=--name=value ...]

One process alternately runs the engine with the worker's code and sends requests to the server over one connection, for
the time of a turn each. The network's time in the worker comes from the metrics. A request with more tokens than the
server computes at once is divided into several runs, also without the server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks import converted
from benchmarks.offline import Alone
from benchmarks.peers.servers import python_path
from conch.backends.base.arrays import Request
from conch.backends.tasks.task import ExecutionWork
from conch.core.tensors import WireTensor, pack_bytes
from tests.servers import ConchServer

SHAPES: Final = ("1x16", "1x128", "8x128", "32x128")
#: A word that is one token; a text has two special tokens in addition.
WORD: Final = "library"
COLUMNS: Final = ("network alone", "in the worker", "ratio", "task alone", "the client waits", "processor alone",
                  "processor served")  # fmt: skip


@dataclass(slots=True)
class Turns:
    """The results for one shape: the median of a request (ms) by column, for each round; and the CPU time of a
    request (ms)."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, column: str, value: float) -> None:
        self.values.setdefault(column, []).append(value)

    def cells(self) -> list[str]:
        """Return the cells of the table: medians over rounds, and the range of the ratios."""
        median = {name: statistics.median(values) for name, values in self.values.items()}
        ratios = [b / a for a, b in zip(self.values["network alone"], self.values["in the worker"], strict=True)]
        cells = {name: f"{value:.2f}" for name, value in median.items()}
        cells["ratio"] = f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f}–{max(ratios):.2f})"
        return [cells[name] for name in COLUMNS]


class Served:
    """A model of a running server; requests for the embeddings of ``rows`` texts use one connection."""

    def __init__(self, server: ConchServer, model: str, rows: int, tokens: int) -> None:
        self._metrics = f"http://{server.metrics}/metrics"
        self._connection = http.client.HTTPConnection(server.http)
        self._path = f"/v2/models/{model}/infer"
        content = pack_bytes([_text(tokens)] * rows)
        document = {
            "inputs": [{"name": "text_input", "shape": [rows, 1], "datatype": "BYTES",
                        "parameters": {"binary_data_size": len(content)}}],
            "outputs": [{"name": "embedding", "parameters": {"binary_data": True}}],
        }  # fmt: skip
        header = json.dumps(document).encode()
        self._body, self._headers = header + content, {"Inference-Header-Content-Length": str(len(header))}
        self._pid = server.process.pid if server.process is not None else 0

    def ask(self) -> None:
        """Send one request."""
        self._connection.request("POST", self._path, self._body, self._headers)
        response = self._connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(content.decode(errors="replace"))

    def engine_ms(self) -> float:
        """The total time of the engine so far."""
        with urllib.request.urlopen(self._metrics) as page:
            match = re.search(rb"^conch_engine_duration_us\{.*\} (\S+)$", page.read(), re.MULTILINE)
        return float(match[1]) / 1000 if match is not None else 0.0

    def processor_ms(self) -> float:
        """The CPU time of the server and its workers so far."""
        import psutil

        server = psutil.Process(self._pid)
        times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
        total: float = sum(usage.user + usage.system for usage in times)
        return 1000 * total


def repeat(call: Callable[[], object], seconds: float) -> tuple[float, int]:
    """Repeat a call for some time; returns its median (ms) without the first two calls, and the number of calls."""
    for _ in range(2):
        call()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times), len(times)


def measure(alone: Alone, served: Served, rows: int, tokens: int, rounds: int, seconds: float) -> Turns:
    """Measure one shape."""
    content = pack_bytes([_text(tokens)] * rows)
    task: Any = alone.task
    turns = Turns()

    def prepared() -> Any:
        return task.prepare(
            Request({"text_input": WireTensor("text_input", "BYTES", (rows, 1), content)}, frozenset(["embedding"]))
        )

    example = prepared()
    budget = max(1, task.budget // example.length)
    sizes = [min(budget, rows - start) for start in range(0, rows, budget)]
    arrays = [alone.arrays_of(example.sequences[:size]) for size in sizes]

    def network() -> None:
        for array in arrays:
            alone.engine.run(array)

    for _ in range(rounds):
        before = time.process_time()
        median, count = repeat(network, seconds)
        turns.add("network alone", median)
        turns.add("processor alone", (time.process_time() - before) * 1000 / (count + 2))
        turns.add("task alone", repeat(lambda: task.execute([prepared()], ExecutionWork()), seconds)[0])
        served.ask()
        engine, processor = served.engine_ms(), served.processor_ms()
        median, count = repeat(served.ask, seconds)
        turns.add("the client waits", median)
        turns.add("in the worker", (served.engine_ms() - engine) / (count + 2))
        turns.add("processor served", (served.processor_ms() - processor) / (count + 2))
    return turns


def _text(tokens: int) -> bytes:
    return " ".join([WORD] * (tokens - 2)).encode()


def table(turns_by_shape: dict[str, Turns]) -> str:
    """Return the shapes as a Markdown table."""
    lines = [["ms a request", *COLUMNS], ["---", *["---:"] * len(COLUMNS)]]
    lines += [[shape, *turns.cells()] for shape, turns in turns_by_shape.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def compare(
    folder: Path, variant: str, shapes: Sequence[str], rounds: int, seconds: float, flags: Sequence[str]
) -> dict[str, Turns]:
    """Measure all shapes of one variant."""
    turns_by_shape = {}
    with tempfile.TemporaryDirectory() as home:
        repository = Path(home) / "models"
        converted.serve(repository, folder, [variant])
        alone = Alone(folder, variant, seconds)
        with ConchServer(repository, "--log-info=false", *flags, env={"PYTHONPATH": python_path()}) as server:
            for shape in shapes:
                rows, tokens = map(int, shape.split("x"))
                served = Served(server, variant, rows, tokens)
                turns_by_shape[shape] = measure(alone, served, rows, tokens, rounds, seconds)
    return turns_by_shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    converted.add_arguments(parser)
    parser.add_argument(
        "--shapes", nargs="+", default=SHAPES, metavar="BxN", help="texts of a request x tokens of each"
    )
    parser.add_argument("--rounds", type=int, default=6, help="turns of each at each shape")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn")
    parser.add_argument("--flag", dest="flags", action="append", default=[], help="a flag of conch serve")
    options = parser.parse_args()
    with converted.folder(options.converted) as folder:
        for name in converted.chosen(folder, options.variants):
            load = os.getloadavg()[0]
            turns_by_shape = compare(folder, name, options.shapes, options.rounds, options.seconds, options.flags)
            print(
                f"{name}; load {load:.1f} before and {os.getloadavg()[0]:.1f} after:\n\n{table(turns_by_shape)}\n",
                flush=True,
            )


if __name__ == "__main__":
    main()
