"""Measures the cost of a remote model: requests to a server directly and through another conch in front, in turns.

    python -m benchmarks.remote [--rounds 5] [--seconds 1]

One client sends sequential requests to the server that runs the model, and to the one in front of it, which uses the
same protocol. A round alternates between both, so that interference affects them equally.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import tritonclient.grpc
import tritonclient.http

from benchmarks.serving import TENSOR_CONFIG, TEXT_CONFIG, write_model
from tests.servers import ConchServer

_MODULES: Final[dict[str, Any]] = {"http": tritonclient.http, "grpc": tritonclient.grpc}
#: How often the servers alternate within a round.
_TURNS: Final = 4
_MEBIBYTE: Final = np.zeros((1 << 18,), np.float32)
_TEXT: Final = np.array([[b"some text"]], np.object_)


@dataclass
class Way:
    """A model over one protocol: directly, and through the server in front. Latencies are in seconds."""

    title: str
    protocol: str
    model: str
    value: np.ndarray
    direct: list[float] = field(default_factory=list)
    through: list[float] = field(default_factory=list)

    def caller(self, server: ConchServer) -> Callable[[], object]:
        """Return a function that sends a request to ``server`` and waits for the response."""
        module = _MODULES[self.protocol]
        client = module.InferenceServerClient(getattr(server, self.protocol))
        name = "INPUT0"
        datatype = "BYTES" if self.value.dtype == np.object_ else "FP32"
        tensor = module.InferInput(name, list(self.value.shape), datatype)
        tensor.set_data_from_numpy(self.value)
        model = self.model if self.protocol == "grpc" else f"{self.model}_http"
        return lambda: client.infer(model, [tensor])

    def row(self) -> str:
        direct, through = (statistics.median(each) * 1e6 for each in (self.direct, self.through))
        return f"| {self.title} | {direct:.0f} | {through:.0f} | **{through - direct:.0f}** |"


def ways() -> list[Way]:
    return [
        Way(f"{what}, {protocol.upper().replace('GRPC', 'gRPC')}", protocol, model, value)
        for what, model, value in (("BYTES identity", "text", _TEXT), ("1 MiB FP32 in and out", "tensor", _MEBIBYTE))
        for protocol in _MODULES
    ]


def write_remote(repository: Path, name: str, url: str, model: str) -> None:
    lines = [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in (("url", url), ("model", model))
    ]
    (repository / name).mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text("\n".join(['backend: "remote"', *lines]))


def spend(call: Callable[[], object], seconds: float) -> list[float]:
    """Return the latencies of the requests within ``seconds``; at least one."""
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while not durations or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    return durations


def measure(back: ConchServer, front: ConchServer, rounds: int, seconds: float) -> list[Way]:
    measured = ways()
    for _ in range(rounds):
        for way in measured:
            direct, through = way.caller(back), way.caller(front)
            for call in (direct, through):
                call()
            for _ in range(_TURNS):
                way.direct += spend(direct, seconds / _TURNS)
                way.through += spend(through, seconds / _TURNS)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each server is asked in a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        repository, in_front = Path(home, "back"), Path(home, "front")
        models = {"text": TEXT_CONFIG, "tensor": TENSOR_CONFIG}
        for name, config in models.items():
            write_model(repository, name, config)
            write_model(repository, f"{name}_http", config)
        with ConchServer(repository) as back:
            for name in models:
                write_remote(in_front, name, f"grpc://{back.grpc}", name)
                write_remote(in_front, f"{name}_http", f"http://{back.http}", f"{name}_http")
            with ConchServer(in_front) as front:
                measured = measure(back, front, options.rounds, options.seconds)
    print("Median latency (µs) of one request at a time:\n")
    print("| question | directly | through another conch | more |")
    print("|---|---|---|---|")
    for way in measured:
        print(way.row())


if __name__ == "__main__":
    main()
