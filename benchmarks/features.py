"""Measures the cost of BLS calls, ensembles, cache hits, shared memory and sequences, in conch and the real Triton.

    python -m benchmarks.features [--rounds 3] [--seconds 2] [--only "shared memory"] [--models 200]

Both servers run the same repository at the same time and are measured in turns, mostly by NVIDIA's perf_analyzer
(medians); ratios are computed within each round. The last row compares two conch servers: one that has loaded this
repository, and one that has loaded ``--models`` more models.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.serving import MEBIBYTE, TENSOR_CONFIG, TEXT, TEXT_CONFIG, Question, measure_in_turns, print_table
from benchmarks.serving import write_model as write_identity
from tests.oracle import TritonServer
from tests.servers import ConchServer

#: The number of BLS calls in one request; the response is their median.
CALLS: Final = 200
_SIZE: Final = str(1 << 20)

_CALLER: Final = f"""import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().reshape(1, -1)
        spans = []
        for _ in range({CALLS}):
            call = pb_utils.InferenceRequest(
                model_name="text", inputs=[pb_utils.Tensor("INPUT0", text)], requested_output_names=["OUTPUT0"]
            )
            begun = time.perf_counter_ns()
            answer = call.exec()
            spans.append(time.perf_counter_ns() - begun)
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
        median = np.array([np.median(spans) / 1000], np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("MICROSECONDS", median)])
"""
_CALLER_CONFIG: Final = """backend: "python"
input [{name: "INPUT0" data_type: TYPE_STRING dims: [1]}]
output [{name: "MICROSECONDS" data_type: TYPE_FP32 dims: [1]}]
instance_group [{kind: KIND_CPU count: 1}]
"""
_ENSEMBLE_CONFIG: Final = """platform: "ensemble"
max_batch_size: 16
input [{name: "INPUT0" data_type: TYPE_STRING dims: [1]}]
output [{name: "OUTPUT0" data_type: TYPE_STRING dims: [1]}]
ensemble_scheduling { step [
  {model_name: "first" model_version: -1
   input_map {key: "INPUT0" value: "INPUT0"} output_map {key: "OUTPUT0" value: "one"}},
  {model_name: "second" model_version: -1
   input_map {key: "INPUT0" value: "one"} output_map {key: "OUTPUT0" value: "two"}},
  {model_name: "third" model_version: -1
   input_map {key: "INPUT0" value: "two"} output_map {key: "OUTPUT0" value: "OUTPUT0"}}
] }
"""
_SUM: Final = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.total = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            value, start, end, ident = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().item()
                for name in ("INPUT0", "START", "END", "ID")
            )
            total = self.total[ident] = (0 if start else self.total[ident]) + value & 0xFFFF
            if end:
                del self.total[ident]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[total]], np.int32))]))
        return responses
"""
_SUM_CONFIG: Final = """backend: "python"
max_batch_size: 16
input [{name: "INPUT0" data_type: TYPE_INT32 dims: [1]}]
output [{name: "OUTPUT0" data_type: TYPE_INT32 dims: [1]}]
instance_group [{kind: KIND_CPU count: 1}]
sequence_batching {
  oldest { max_candidate_sequences: 64 }
  control_input [
    {name: "START" control [{kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1]}]},
    {name: "END" control [{kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1]}]},
    {name: "ID" control [{kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64}]}
  ]
}
"""
_MEDIAN: Final = ("--percentile", "50")
_REGIONS: Final = (*MEBIBYTE, "--shared-memory", "system", "--output-shared-memory-size", _SIZE)
_SEQUENCES: Final = ("--shape", "INPUT0:1", "--sequence-length", "10")


@dataclass
class Call(Question):
    """The median time (µs) of one BLS call, measured by the calling model."""

    def ask(self, server: ConchServer | TritonServer, seconds: float) -> float:
        tensor = {"name": "INPUT0", "shape": [1], "datatype": "BYTES", "data": ["some text"]}
        request = urllib.request.Request(
            f"http://{server.http}/v2/models/{self.model}/infer", json.dumps({"inputs": [tensor]}).encode()
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return float(json.load(response)["outputs"][0]["data"][0])


def questions() -> list[Question]:
    """Return the rows of the comparison."""
    calls: list[Question] = [Call("one BLS call to an identity", "caller", "http", 1, "latency", ())]
    for protocol, name in (("http", "HTTP"), ("grpc", "gRPC")):

        def ask(
            title: str,
            model: str,
            concurrency: int,
            arguments: tuple[str, ...],
            protocol: str = protocol,
            name: str = name,
        ) -> Question:
            figure = "latency" if concurrency == 1 else "throughput"
            title = f"{title}, {name}, concurrency {concurrency}"
            return Question(title, model, protocol, concurrency, figure, (*arguments, *_MEDIAN))

        calls += [
            *(ask("ensemble of three identities", "ensemble", concurrency, TEXT) for concurrency in (1, 16)),
            *(ask("response cache, every request a hit", "cached", concurrency, TEXT) for concurrency in (1, 16)),
            *(ask("1 MiB FP32 in and out, shared memory", "tensor", concurrency, _REGIONS) for concurrency in (1, 4)),
        ]
    calls += [
        Question(
            f"sequences of 10, gRPC, concurrency {concurrency}", "sum", "grpc", concurrency, "throughput", _SEQUENCES
        )
        for concurrency in (4, 16)
    ]
    return calls


def write_repository(repository: Path) -> None:
    """Write the models of all rows."""
    for name in ("text", "first", "second", "third"):
        write_identity(repository, name, TEXT_CONFIG)
    write_identity(repository, "tensor", TENSOR_CONFIG)
    write_identity(repository, "cached", TEXT_CONFIG + "response_cache { enable: true }\n")
    for name, config, source in (("caller", _CALLER_CONFIG, _CALLER), ("sum", _SUM_CONFIG, _SUM)):
        write_identity(repository, name, config)
        (repository / name / "1" / "model.py").write_text(source)
    (repository / "ensemble" / "1").mkdir(parents=True)
    (repository / "ensemble" / "config.pbtxt").write_text(_ENSEMBLE_CONFIG)


@contextlib.contextmanager
def servers(home: Path) -> Iterator[tuple[ConchServer, TritonServer]]:
    """Run conch and Triton on the same repository."""
    write_repository(home)
    cache = f"--cache-config=local,size={64 << 20}"
    with ConchServer(home, cache, "--allow-client-shm=true") as conch, TritonServer(home, cache) as triton:
        yield conch, triton


def many_models(few: ConchServer, count: int, rounds: int, seconds: float) -> str:
    """Describe the cost of a request with ``count`` more models loaded, compared with ``few``."""
    question = Question("", "text", "http", 1, "latency", (*TEXT, *_MEDIAN))
    ratios = []
    with tempfile.TemporaryDirectory() as home:
        write_identity(Path(home), "text", TEXT_CONFIG)
        for number in range(count):
            write_identity(Path(home), f"model{number}", TEXT_CONFIG)
        with ConchServer(Path(home)) as many:
            for _ in range(rounds):
                with_few = question.ask(few, seconds)
                ratios.append(question.ask(many, seconds) / with_few)
    return (
        f"With {count} more models loaded, the latency of a request is {statistics.median(ratios):.2f} times that with "
        f"few ({min(ratios):.2f}–{max(ratios):.2f})."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--only", default="", help="a part of the titles to measure")
    parser.add_argument("--models", type=int, default=200, help="models of the last row; 0 leaves it out")
    options = parser.parse_args()

    selected = [question for question in questions() if options.only.lower() in question.title.lower()]
    with tempfile.TemporaryDirectory() as home, servers(Path(home)) as (conch, triton):
        measure_in_turns(selected, conch, triton, options.rounds, options.seconds)
        print_table(selected)
        sys.stdout.flush()
        if options.models:
            print(f"\n{many_models(conch, options.models, options.rounds, options.seconds)}")


if __name__ == "__main__":
    main()
