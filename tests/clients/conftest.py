"""A server for all clients, and the record of what was exercised: ``@pytest.mark.client(name, *features)``."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.record import Features, add_run
from tests.models import build
from tests.servers import ConchServer

#: Whether each feature works, by client.
_OUTCOMES: dict[str, dict[str, bool]] = defaultdict(dict)


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("clients")
    repository = build(folder / "models", group="clients")
    build(repository, "talker", group="openai")
    with ConchServer(repository, log=folder / "log", env={"EVENTS": str(folder)}) as server:
        yield f"http://{server.http}"


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when != "call":
        return
    for mark in item.iter_markers("client"):
        name, *features = mark.args
        for feature in features:
            _OUTCOMES[name][feature] = _OUTCOMES[name].get(feature, True) and call.excinfo is None


def pytest_sessionfinish() -> None:
    if os.environ.get("RECORD_CLIENTS"):
        add_run({name: Features(feature for feature, works in features.items() if works)
                 for name, features in _OUTCOMES.items()})  # fmt: skip
