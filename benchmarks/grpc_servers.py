"""Compares conch's gRPC front end with ``grpc.aio`` in its place: the cost of requests, and attacks.

    python -m benchmarks.grpc_servers [--rounds 3] [--seconds 2] [--attack settings_without_pause ...]

Everything behind the port is the same (:mod:`benchmarks.peers.grpc_aio`). The attacks are those of ``tests/hostile``
on the gRPC port: the longest wait of a health request on the HTTP port, and the growth of the server's memory at its
peak and after the attack. See docs/decisions/0001.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import tests.hostile.attacks  # noqa: F401 (declares them)
from benchmarks.peers.servers import python_path
from benchmarks.serving import TENSOR_CONFIG, TEXT_CONFIG, measure_in_turns, print_table, questions, write_model
from tests.hostile.attack import ATTACKS, measure
from tests.hostile.servers import FLAGS, write_models
from tests.servers import ConchServer


class AioServer(ConchServer):
    """conch with its gRPC port served by ``grpc.aio``."""

    def __init__(self, repository: Path | str, *flags: str, log: Path | None = None) -> None:
        super().__init__(repository, *flags, log=log, env={"PYTHONPATH": python_path()})
        self.command = [sys.executable, "-m", "benchmarks.peers.grpc_aio", *self.command[1:]]


def outcome(name: str, kind: type[ConchServer]) -> str:
    with tempfile.TemporaryDirectory() as home:
        write_models(Path(home))
        with kind(Path(home), *FLAGS) as server:
            try:
                result = measure(ATTACKS[name], server)
            except TimeoutError:
                return "no answer"
            except OSError as error:
                assert server.process is not None
                return "ends" if server.process.poll() is not None else f"refused: {type(error).__name__}"
    return f"{result.longest_wait * 1000:.0f} ms, peak {result.peak:+.0f} MiB, kept {result.kept:+.0f} MiB"


def main() -> None:
    attacks = [name for name, attack in ATTACKS.items() if attack.run.__module__.endswith((".http2", ".grpc_messages"))]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--attack", nargs="*", choices=attacks, default=attacks)
    options = parser.parse_args()

    selected = [question for question in questions() if question.protocol == "grpc"]
    with tempfile.TemporaryDirectory() as home:
        write_model(Path(home), "text", TEXT_CONFIG)
        write_model(Path(home), "tensor", TENSOR_CONFIG)
        with ConchServer(Path(home)) as conch, AioServer(Path(home)) as aio:
            measure_in_turns(selected, conch, aio, options.rounds, options.seconds)
    print_table(selected, "grpc.aio")
    print("\n| attack | conch | grpc.aio |\n|---|---|---|")
    for name in options.attack:
        print(f"| {ATTACKS[name].title} | {outcome(name, ConchServer)} | {outcome(name, AioServer)} |", flush=True)


if __name__ == "__main__":
    main()
