"""The fixture that starts worker processes; see ``worker.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.backends.python.worker import Launch, Worker


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Make a worker for a model's source; ``start=False`` leaves the instance to the test."""
    workers: list[Worker] = []

    def launch(
        source: str | None, *, start: bool = True, decoupled: bool = False, python: str = sys.executable, **config: Any
    ) -> Worker:
        if decoupled:
            config["model_transaction_policy"] = {"decoupled": True}
        worker = Worker(tmp_path / str(len(workers)) / "m", source, config, python)
        workers.append(worker)
        if start:
            assert worker.start()["op"] == "ready"
        return worker

    yield launch
    for worker in workers:
        worker.socket.close()
        worker.endpoint.close()
        worker.process.kill()
        worker.process.communicate()
