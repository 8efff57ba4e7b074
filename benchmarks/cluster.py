"""Measures ``conch deploy ray``: latency by path, throughput by number of replicas, and time to recover.

    python -m benchmarks.cluster [--rounds 5] [--seconds 1] [--replicas 1,2,4] [--parts latency,throughput,recovery]

Starts a cluster of three Ray nodes on this machine. Latency: one client sends requests to a replica's port (a bare
server) and to the ingress in front of it, in turns. Throughput: a model that sleeps, with one instance and one request
at a time, so that replicas scale even on few cores. Recovery: the time from killing a replica, or a node with one,
until as many replicas respond as before; and the errors that the clients got.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import tritonclient.grpc
import tritonclient.http

from benchmarks.remote import spend
from tests.deploy.ray.cluster import Load, RayCluster, ask, urls
from tests.models import HERE as MODELS
from tests.models import write

_MODULES: Final[dict[str, Any]] = {"http": tritonclient.http, "grpc": tritonclient.grpc}
_IDENTITY: Final = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
"""
#: How often the paths alternate within a round.
_TURNS: Final = 4
#: How long the model sleeps (s), and the number of clients per replica.
_SLEEP: Final = 0.05
_CALLERS: Final = 4
PARTS: Final = ("latency", "throughput", "recovery")


def write_models(repository: Path) -> None:
    """Write ``identity``, which returns its input, and ``where``, which sleeps and returns where it runs."""
    write(repository, "identity", _IDENTITY)
    (repository / "identity" / "1").mkdir()
    shutil.copytree(MODELS / "ray" / "where", repository / "where")
    config = repository / "where" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 8", "max_batch_size: 1"))


def caller(protocol: str, address: str) -> Callable[[], object]:
    """Return a function that sends a request to ``address`` and waits for the response."""
    module = _MODULES[protocol]
    client = module.InferenceServerClient(address)
    tensor = module.InferInput("INPUT0", [1, 16], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 16), np.float32))
    return lambda: client.infer("identity", [tensor])


def latency(cluster: RayCluster, said: str, rounds: int, seconds: float) -> None:
    print("Median latency (ms) of one request at a time:\n")
    print("| protocol | a replica's own port | the ingress | more |")
    print("|---|---|---|---|")
    replica = next(candidate for candidate in cluster.replicas() if candidate.deployment == "identity")
    for protocol in ("http", "grpc"):
        direct = str(getattr(replica, protocol)).partition("://")[2]
        ingress = next(iter(urls(said, protocol).values())).partition("://")[2]
        ways = [caller(protocol, address) for address in (direct, ingress)]
        durations: list[list[float]] = [[] for _ in ways]
        for way in ways:
            way()
        for _ in range(rounds * _TURNS):
            for way, times in zip(ways, durations, strict=True):
                times += spend(way, seconds / _TURNS)
        bare, through = (statistics.median(times) * 1e3 for times in durations)
        name = {"http": "HTTP", "grpc": "gRPC"}[protocol]
        print(f"| {name} | {bare:.2f} | {through:.2f} | **{through - bare:.2f}** |")


def throughput(deploy: Callable[[int], str], counts: Sequence[int], seconds: float) -> None:
    print(f"\nRequests per second of a model that sleeps {_SLEEP * 1e3:.0f} ms, {_CALLERS} callers for each replica:\n")
    print("| replicas | requests/s | of what the replicas could do |")
    print("|---|---|---|")
    for replicas in counts:
        url = next(iter(urls(deploy(replicas), "http").values()))
        with Load([url], _CALLERS * replicas, _SLEEP) as load:
            load.more(replicas * 2)
            before, start = len(load.answers), time.perf_counter()
            time.sleep(seconds)
            rate = (len(load.answers) - before) / (time.perf_counter() - start)
        if load.failures:
            sys.exit(load.failures[0])
        print(f"| {replicas} | {rate:.1f} | {rate * _SLEEP / replicas:.0%} |")


def recovery(cluster: RayCluster, said: str) -> None:
    print("\nTwo replicas and four callers; what is killed, until two replicas answer again:\n")
    print("| killed | seconds | requests meanwhile | failed |")
    print("|---|---|---|---|")
    head = cluster.head()
    url = urls(said, "http")[head[:8]]
    with Load([url], 4, 0.01) as load:
        load.more(20)
        victim = load.answers[-1]["PROCESS"]
        row("a replica", load, lambda: os.kill(victim, signal.SIGKILL), {victim})
        replicas = [replica for replica in cluster.replicas() if replica.deployment == "where" and replica.node != head]
        if replicas:
            process = int(ask(replicas[0].http)["PROCESS"])
            row("a node", load, lambda: cluster.kill(replicas[0].node), {process})


def row(what: str, load: Load, kill: Callable[[], object], gone: set[int]) -> None:
    """Print the time after ``kill`` until two replicas other than those ``gone`` respond."""
    completed, failures, start = len(load.answers), len(load.failures), time.perf_counter()
    kill()
    while len({response["PROCESS"] for response in load.answers[completed:][-100:]} - gone) < 2:
        time.sleep(0.01)
    took = time.perf_counter() - start
    failed = len(load.failures) - failures
    print(f"| {what} | {took:.1f} | {len(load.answers) - completed + failed} | {failed} |")


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each way is asked in a round")
    parser.add_argument("--replicas", default="1,2,4", help="how many replicas the throughput is measured with")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure")
    return parser.parse_args(arguments)


def measure(cluster: RayCluster, arguments: argparse.Namespace) -> None:
    """Measure on a cluster, and print the tables."""
    parts = arguments.parts.split(",")
    with tempfile.TemporaryDirectory() as home:
        repository = Path(home)
        write_models(repository)

        def deploy(replicas: int) -> str:
            ended = cluster.deploy(repository, "--cpus-per-replica=0.25", f"--min-replicas={replicas}")
            if ended.returncode:
                sys.exit(ended.stderr)
            return ended.stdout

        try:
            said = deploy(1)
            if "latency" in parts:
                latency(cluster, said, arguments.rounds, arguments.seconds)
            if "throughput" in parts:
                throughput(
                    deploy,
                    [int(count) for count in arguments.replicas.split(",")],
                    arguments.rounds * arguments.seconds,
                )
            if "recovery" in parts:
                recovery(cluster, deploy(2))
        finally:
            cluster.remove()


def main() -> None:
    arguments = options()
    cluster = RayCluster(nodes=3, cores=4)
    try:
        measure(cluster, arguments)
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
