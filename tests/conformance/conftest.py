"""Clients of the servers under test, and helpers that enforce a known order of events."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clients import Client
from tests.conformance.raw import Reply, post, tensor
from tests.conftest import Server
from tests.events import Events, eventually


@pytest.fixture(scope="session", params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Client:
    """tritonclient for HTTP and for gRPC, for each server."""
    return Client(request.param, server)


@pytest.fixture
def events(tmp_path: Path) -> Events:
    """Events of the model ``gate``, which reports that it has started and then waits for a signal."""
    return Events(tmp_path)


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    """Runs a call in a thread: ``background(function, *arguments)`` is its future."""
    with ThreadPoolExecutor(32) as pool:
        yield pool.submit


def gate_request(events: Events, name: str) -> dict[str, Any]:
    """The JSON body of a request to ``gate``."""
    return {
        "id": name,
        "inputs": [tensor("EVENTS", "BYTES", [str(events.folder)], [1, 1]), tensor("NAME", "BYTES", [name], [1, 1])],
    }


def pass_gate(server: Server, events: Events, name: str, model: str = "gate") -> Reply:
    """Send a request through the gate and wait for the response."""
    return post(server.http, f"/v2/models/{model}/infer", gate_request(events, name))


def pending(server: Server, model: str) -> int:
    """Return the number of queued requests of the model, from the server's metrics."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        text = page.read().decode()
    found = re.search(rf'nv_inference_pending_request_count{{model="{model}",version="1"}} (\d+)', text)
    return int(found[1]) if found else 0


def wait_for_pending(server: Server, model: str, count: int) -> None:
    eventually(lambda: pending(server, model) == count, f"{count} pending requests of {model}")
