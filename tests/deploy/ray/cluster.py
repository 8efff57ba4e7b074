"""A cluster of several Ray nodes on this machine, and ``conch deploy ray`` on it, as a user calls it."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from conch.deploy.ray.registry import ReplicaRecord
from tests.events import eventually
from tests.servers import CONCH

ENVIRONMENT = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
LOOPBACK = ("--host=127.0.0.1", *(f"--replica-option={kind}_address=127.0.0.1" for kind in ("http", "grpc")))
#: How fast a dead node is taken for dead: by default it takes Ray half a minute.
SOON_DEAD = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


class RayCluster:
    """Nodes that come and go; ``address`` is that of the first one."""

    def __init__(self, nodes: int, cores: int) -> None:
        from ray.cluster_utils import Cluster

        self._cores = cores
        head = {"num_cpus": cores, "include_dashboard": False, "_system_config": SOON_DEAD}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        for _ in range(nodes - 1):
            self.add()

    def add(self) -> None:
        self._cluster.add_node(num_cpus=self._cores)

    def kill(self, node: str) -> None:
        """Kill a node with all that runs on it, by its id in Ray."""
        victim = next(one for one in self._cluster.list_all_nodes() if one.node_id == node)
        self._cluster.remove_node(victim, allow_graceful=False)

    def head(self) -> str:
        node: str = self._cluster.head_node.node_id
        return node

    def close(self) -> None:
        self._cluster.shutdown()

    def deploy(self, repository: Path, *flags: str) -> subprocess.CompletedProcess[str]:
        """``conch deploy ray --detach``, with its ingresses on free ports; returns what it said when it has ended."""
        command = [*self._command(repository), "--detach", *flags]
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)

    @contextmanager
    def deploying(self, repository: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
        """The same in the foreground."""
        command = [*self._command(repository), *flags]
        with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def _command(self, repository: Path) -> list[str]:
        command = [str(CONCH), "deploy", "ray", f"--model-repository={repository}", f"--address={self.address}"]
        return [*command, *LOOPBACK, *FREE_PORTS, "--timeout-secs=150", "--drain-secs=2"]

    def replicas(self) -> Sequence[ReplicaRecord]:
        """The replicas that answer."""
        from conch.deploy.ray.cluster import RayApplication, connected

        with connected(self.address):
            return RayApplication("conch").replicas()

    def remove(self) -> int:
        """Take away what is deployed; returns the exit status, 1 where nothing is."""
        command = [str(CONCH), "deploy", "ray", "--remove", f"--address={self.address}"]
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=90).returncode


def urls(said: str, scheme: str) -> dict[str, str]:
    """Where the ingresses listen, by the first letters of their nodes; for HTTP, the first of two is the API's."""
    found = {}
    for line in said.splitlines():
        words = line.split()
        if words[:1] == ["node"]:
            found[words[1].rstrip(":")] = next(word for word in words[2:] if word.startswith(scheme))
    return found


def ask(url: str, text: str = "x", seconds: float = 0.0) -> dict[str, Any]:
    """What the model ``where`` answers. Raises for any other status than 200."""
    response = requests.post(
        f"{url}/v2/models/where/generate", json={"text_input": text, "SECONDS": seconds}, timeout=30
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


class Load:
    """Callers that ask one after the other until the end: what they were answered, and what went wrong."""

    def __init__(self, targets: Sequence[str], callers: int, seconds: float) -> None:
        self.answers: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(targets[number % len(targets)], number, seconds))
            for number in range(callers)
        ]

    def _run(self, url: str, number: int, seconds: float) -> None:
        asked = 0
        while not self._ended.is_set():
            asked += 1
            try:
                self.answers.append(ask(url, f"{number} {asked}", seconds))
            except Exception as error:
                self.failures.append(str(error))

    def more(self, count: int) -> None:
        """Wait until ``count`` more requests have been answered."""
        target = len(self.answers) + count
        eventually(lambda: len(self.answers) >= target, f"{count} answers", 60)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
