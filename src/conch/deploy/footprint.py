"""Measures the memory of a server with all models of a repository, by starting one on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from os import environ
from pathlib import Path
from typing import Final, NamedTuple

from conch.core.errors import ConchError, internal
from conch.deploy.trial import RESPONSE_SECONDS, free_port, wait_until_healthy
from conch.machine.guarded_server import GuardedServer
from conch.machine.memory import resident_bytes
from conch.machine.temporary import TemporaryFolder
from conch.measure.metrics_page import labels_of, read_page, samples

_HOST: Final = "127.0.0.1"


class ServerMemory(NamedTuple):
    """The memory of the server process, and of all workers and worker templates (bytes)."""

    server: int
    models: int

    @property
    def total(self) -> int:
        return self.server + self.models


def measure_memory(repository: Path) -> ServerMemory:
    """Load all models of ``repository`` and return the memory of the server and its workers.

    Raises INTERNAL if the server does not start or a model does not load.
    """
    with TemporaryFolder("deploy") as folder:
        port, metrics = free_port(), free_port()
        command = [
            sys.executable, "-m", "conch", "serve", f"--model-repository={repository.resolve()}",
            f"--http-address={_HOST}", f"--http-port={port}", "--allow-grpc=false", f"--metrics-port={metrics}",
            "--worker-template-secs=600", "--exit-timeout-secs=5",
        ]  # fmt: skip
        server = GuardedServer(command, folder / "log", dict(environ), folder)
        try:
            wait_until_healthy(server, port, "/v2/health/ready")
            # A page shows what was read for the page before.
            pages = [read_page(f"http://{_HOST}:{metrics}/metrics", RESPONSE_SECONDS) for _ in range(2)]
            return ServerMemory(resident_bytes(server.pid), sum(_on_cpu(pages[-1])))
        except ConchError as error:
            raise internal(
                f"the memory of the models cannot be measured here: {error.message}; give --memory"
            ) from None
        finally:
            server.close()


def _on_cpu(page: str) -> Iterator[int]:
    """Yield the memory of models on the CPU, and of the processes that their workers are forked from (bytes)."""
    for name, labels, value in samples(page):
        in_workers = labels_of(labels).get("kind") in ("workers", "shared_regions")
        if name == "conch_template_memory_bytes" or (name == "conch_model_memory_bytes" and in_workers):
            yield int(value)
