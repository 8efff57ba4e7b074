"""The fixture that starts worker processes; see ``worker.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.backends.python.interpreters import find_interpreter, make_environment
from tests.unit.backends.python.worker import LaunchWorker, Template, Worker


@pytest.fixture
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of the workers: that of the tests or, parametrised with a version, one of that version."""
    version = getattr(request, "param", None)
    if version is None:
        return sys.executable
    interpreter = find_interpreter(version)
    if interpreter is None:
        pytest.skip(f"there is no CPython {version} on this machine")
    cache = request.config.cache if hasattr(request.config, "cache") else None  # there is none with -p no:cacheprovider
    kept = cache.mkdir("interpreters") if cache is not None else tmp_path_factory.getbasetemp() / "interpreters"
    return make_environment(version, interpreter, kept)


@pytest.fixture(scope="session")
def template() -> Iterator[Template | None]:
    """The template of workers under the interpreter of the tests; None where the server has none either."""
    if sys.platform != "linux":
        yield None
        return
    template = Template()
    yield template
    template.close()


@pytest.fixture
def launch(tmp_path: Path, python: str, template: Template | None) -> Iterator[LaunchWorker]:
    """Make a worker for a model's source; ``start=False`` leaves the instance to the test.

    As in the server, a template forks workers under the interpreter of the tests, unless ``fork=False`` asks for a
    process with streams of its own.
    """
    workers: list[Worker] = []

    def launch(
        source: str | None, *, start: bool = True, fork: bool = True, decoupled: bool = False, **config: Any
    ) -> Worker:
        if decoupled:
            config["model_transaction_policy"] = {"decoupled": True}
        forks = template if fork and python == sys.executable else None
        worker = Worker(tmp_path / str(len(workers)) / "m", source, config, python, forks)
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
