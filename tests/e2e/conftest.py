"""Servers for tests that end them, fill them or kill parts of them: one for each test, of conch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.events import Events
from tests.models import build
from tests.servers import ConchServer

Serve = Callable[..., ConchServer]


@pytest.fixture
def events(tmp_path: Path) -> Events:
    (tmp_path / "events").mkdir()
    return Events(tmp_path / "events")


@pytest.fixture
def serve(tmp_path: Path, stack: ExitStack, events: Events) -> Iterator[Serve]:
    """Start conch over models of the toy repository: ``serve("gate", "e2e/crash", flags=(…))``."""

    def serve(*names: str, flags: tuple[str, ...] = (), wait: bool = True) -> ConchServer:
        repository = tmp_path / "models"
        for name in names:
            group, _, model = name.rpartition("/")
            build(repository, model, group=group or "main")
        environment = {"EVENTS": str(events.folder)}
        return stack.enter_context(
            ConchServer(repository, *flags, log=tmp_path / "server.log", env=environment, wait=wait)
        )

    yield serve
    log = tmp_path / "server.log"
    if log.exists():
        print(log.read_text()[-4000:])  # pytest shows it if the test has failed


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    """Runs a call in a thread: ``background(function, *arguments)`` is its future."""
    with ThreadPoolExecutor(64) as pool:
        yield pool.submit
