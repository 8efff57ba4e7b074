"""Runs the soak, prints what happened, and exits with 1 if a request or the memory went astray."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from benchmarks.soak.aftermath import processes, still_kept, still_running, unread_traces
from benchmarks.soak.asking import PATIENCE
from benchmarks.soak.clients import Clients
from benchmarks.soak.faults import Faults
from benchmarks.soak.features import server_flags, write_features
from benchmarks.soak.outcomes import Outcomes
from benchmarks.soak.repository import write_repository
from benchmarks.soak.sequences import Sequences
from benchmarks.soak.watch import Watch
from tests.servers import ConchServer

#: Memory (MiB) that the server may have more in the last fifth of the time than in the second.
GROWTH: Final = 32.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=48, help="threads that ask")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="keep the server's log in this file")
    parser.add_argument("--sequences", type=int, default=50, help="how many are under way at a time")
    parser.add_argument("--faults", nargs="+", default=[], metavar="NAME", help="break these only: 'worker killed' …")
    options = parser.parse_args()

    outcomes = Outcomes()
    with tempfile.TemporaryDirectory(prefix="conch-soak-") as folder:
        repository = write_repository(Path(folder) / "models")
        write_features(repository, Path(folder) / "backends")
        log = options.log or Path(folder) / "server.log"
        flags = ("--model-control-mode=explicit", "--load-model=*", *server_flags(Path(folder)))
        with ConchServer(repository, *flags, log=log) as server:
            clients = Clients(server.http, server.grpc, outcomes, options.seed)
            sequences = Sequences(server.grpc, options.sequences, options.minutes * 60, options.seed)
            faults, watch = Faults(server, repository, options.seed, options.faults), Watch(server)
            clients.start(options.clients)
            sequences.start()
            faults.start()
            watch.start()
            until = monotonic() + options.minutes * 60
            assert server.process is not None
            while monotonic() < until and server.process.poll() is None:
                sleep(0.2)
            died = server.process.poll()
            faults.stop()
            waiting = clients.stop() + (not sequences.join(PATIENCE))
            watch.stop()
            left = still_kept(server) if died is None else []
            children = processes(server) if died is None else []
        left += [*still_running(children), *unread_traces(Path(folder))]
    print(report(options.minutes, outcomes, sequences, faults, watch))
    problems = [*_problems(outcomes, watch, waiting, died), *sequences.wrong[:20], *left]
    print("\n".join(problems) or "Every request was answered, or failed for a known reason.", file=sys.stderr)
    raise SystemExit(bool(problems))


def report(minutes: float, outcomes: Outcomes, sequences: Sequences, faults: Faults, watch: Watch) -> str:
    """The figures, as a list."""
    completed = sum(outcomes.answered.values())
    memory = [sample.memory for sample in watch.samples] or [0.0]
    descriptors = [sample.descriptors for sample in watch.samples] or [0]
    lines = [
        f"{minutes:g} minutes on {os.cpu_count()} cores: {completed:,} right answers"
        f" ({', '.join(f'{model} {count:,}' for model, count in sorted(outcomes.answered.items()))})",
        f"errors with a known cause: {_counts(outcomes.explained)};"
        f" connections refused: {outcomes.refused_connections:,}",
        f"wrong answers or unexplained errors: {len(outcomes.wrong)}; without an answer: {len(outcomes.hung)}",
        f"requests of sequences: {_counts(sequences.outcomes)}",
        f"longest wait for an answer: {max(outcomes.longest, sequences.longest):.1f} s",
        f"memory of the server: {min(memory):.0f} to {max(memory):.0f} MiB,"
        f" {watch.growth():+.0f} MiB from the second fifth of the time to the last",
        f"descriptors: {min(descriptors)} to {max(descriptors)}",
        f"faults: {_counts(faults.done)}",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"


def _problems(outcomes: Outcomes, watch: Watch, waiting: int, died: int | None) -> list[str]:
    problems = [*outcomes.hung[:10], *outcomes.wrong[:20]]
    if waiting:
        problems.append(f"{waiting} clients never had an answer")
    if died is not None:
        problems.append(f"the server ended with status {died}")
    if watch.growth() > GROWTH:
        problems.append(f"the server's memory grew by {watch.growth():.0f} MiB")
    return problems


if __name__ == "__main__":
    main()
