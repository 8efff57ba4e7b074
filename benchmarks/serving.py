"""Measures the cost of serving in conch and the real Triton, with the same ``model.py`` and ``config.pbtxt``.

    python -m benchmarks.serving [--rounds 3] [--seconds 2]

Both servers run at the same time and are measured in turns by NVIDIA's perf_analyzer. A row shows the median over the
rounds for both, and the median of the ratios within each round. Quote ratios: absolute figures depend on the machine
and its other load.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.windows import ask_perf_analyzer
from tests.oracle import TritonServer
from tests.servers import ConchServer

MODEL = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor.as_numpy())]))
        return responses
"""

TEXT_CONFIG = """backend: "python"
max_batch_size: 16
input [{name: "INPUT0" data_type: TYPE_STRING dims: [1]}]
output [{name: "OUTPUT0" data_type: TYPE_STRING dims: [1]}]
dynamic_batching { }
instance_group [{kind: KIND_CPU count: 1}]
"""

TENSOR_CONFIG = """backend: "python"
input [{name: "INPUT0" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1]}]
instance_group [{kind: KIND_CPU count: 1}]
"""

TEXT = ("--string-data", "some text", "--shape", "INPUT0:1")
MEBIBYTE = ("--shape", f"INPUT0:{2**18}")
MODELS = 10


@dataclass
class Question:
    """One row: the arguments of perf_analyzer, and the figure of its result that counts."""

    title: str
    model: str
    protocol: str
    concurrency: int
    figure: str
    arguments: tuple[str, ...]
    conch: list[float] = field(default_factory=list)
    triton: list[float] = field(default_factory=list)

    def ask(self, server: ConchServer | TritonServer, seconds: float) -> float:
        address = server.http if self.protocol == "http" else server.grpc
        throughput, latency = ask_perf_analyzer(
            "-m", self.model, "-i", self.protocol, "-u", address,
            "--concurrency-range", str(self.concurrency), *self.arguments, seconds=seconds,
        )  # fmt: skip
        return throughput if self.figure == "throughput" else latency

    def row(self) -> str:
        ratios = [ours / theirs for ours, theirs in zip(self.conch, self.triton, strict=True)]
        unit = "infer/s" if self.figure == "throughput" else "µs"
        return (
            f"| {self.title} | {self.figure} ({unit}) | {statistics.median(self.conch):.0f} "
            f"| {statistics.median(self.triton):.0f} | **{statistics.median(ratios):.2f}** "
            f"| {min(ratios):.2f}–{max(ratios):.2f} |"
        )


def questions() -> list[Question]:
    measured = []
    for protocol in ("http", "grpc"):
        name = {"http": "HTTP", "grpc": "gRPC"}[protocol]
        measured += [
            Question(f"BYTES identity, {name}, concurrency 1", "text", protocol, 1, "latency", TEXT),
            Question(f"BYTES identity, {name}, concurrency 16", "text", protocol, 16, "throughput", TEXT),
            Question(f"1 MiB FP32 in and out, {name}, concurrency 1", "tensor", protocol, 1, "throughput", MEBIBYTE),
            Question(f"1 MiB FP32 in and out, {name}, concurrency 4", "tensor", protocol, 4, "throughput", MEBIBYTE),
        ]
    return measured


def write_model(repository: Path, name: str, config: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.py").write_text(MODEL)
    (repository / name / "config.pbtxt").write_text(config)


def time_to_ready() -> float:
    """Return the seconds from starting the process until it is ready, with ten identity models."""
    with tempfile.TemporaryDirectory() as home:
        for number in range(MODELS):
            write_model(Path(home), f"model{number}", TEXT_CONFIG)
        start = time.monotonic()
        with ConchServer(Path(home)):
            return time.monotonic() - start


@contextlib.contextmanager
def servers() -> Iterator[tuple[ConchServer, TritonServer]]:
    with tempfile.TemporaryDirectory() as home:
        write_model(Path(home), "text", TEXT_CONFIG)
        write_model(Path(home), "tensor", TENSOR_CONFIG)
        with ConchServer(Path(home)) as conch, TritonServer(Path(home)) as triton:
            yield conch, triton


def measure_in_turns(
    selected: Sequence[Question], conch: ConchServer, triton: ConchServer | TritonServer, rounds: int, seconds: float
) -> None:
    """Measure every row on both servers in each round, in alternating order, so that drift affects both servers
    equally."""
    for number in range(rounds):
        for question in selected:
            order: list[tuple[list[float], ConchServer | TritonServer]]
            order = [(question.conch, conch), (question.triton, triton)]
            for figures, server in order if number % 2 == 0 else reversed(order):
                figures.append(question.ask(server, seconds))
            print(f"round {number + 1}: {question.row()}", file=sys.stderr)


def print_table(selected: Sequence[Question], peer: str = "Triton 2.51") -> None:
    """Print the results as a Markdown table."""
    print(f"| question | figure | conch | {peer} | ratio | range |")
    print("|---|---|---|---|---|---|")
    for question in selected:
        print(question.row())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--only", default="", help="a part of the titles to measure")
    options = parser.parse_args()

    selected = [question for question in questions() if options.only.lower() in question.title.lower()]
    with servers() as (conch, triton):
        assert conch.process is not None
        idle = psutil.Process(conch.process.pid).memory_info().rss / 2**20
        measure_in_turns(selected, conch, triton, options.rounds, options.seconds)

    print_table(selected)
    print(
        f"\nIdle server process: {idle:.0f} MiB resident. Start to ready with {MODELS} models: {time_to_ready():.1f} s."
    )


if __name__ == "__main__":
    main()
