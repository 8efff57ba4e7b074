"""A server with the models of ``tests/models/openai``, and OpenAI's client for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.events import Events
from tests.models import build
from tests.oracle.run import free_ports
from tests.servers import ConchServer


@pytest.fixture(scope="package")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Events:
    return Events(tmp_path_factory.mktemp("events"))


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, waiting: Events) -> Iterator[ConchServer]:
    folder = tmp_path_factory.mktemp("openai")
    repository = build(folder / "models", group="openai")
    build(repository, "identity_fp32")
    environment = {"EVENTS": str(waiting.folder)}
    (port,) = free_ports(1)
    flags = [f"--openai-port={port}", "--response-store-bytes=1000000"]
    with ConchServer(repository, *flags, log=folder / "log", env=environment) as server:
        server.openai = f"127.0.0.1:{port}"  # type: ignore[attr-defined]
        yield server


@pytest.fixture(scope="package")
def client(server: ConchServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client
