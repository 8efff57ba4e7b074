"""Exchanges whose models are loaded while they wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conch.core.errors import not_found, unavailable
from conch.frontends.budget import ByteBudget
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.offloading.offloader import Offloader
from tests.unit.frontends.http.test_replaced_models import CHAT, INFER, Client, Core
from tests.unit.frontends.on_demand import LateModels

SMALL_INFER = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}
SMALL_CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
POSTS = [
    ("/v2/models/m/infer", SMALL_INFER),
    ("/v2/models/m/infer", INFER),
    ("/v2/models/m/generate", {"text_input": "x"}),
    ("/v2/models/m/generate_stream", {"text_input": "x"}),
    ("/v1/chat/completions", SMALL_CHAT),
    ("/v1/chat/completions", CHAT),
]


class LateClient(Client):
    """Asks a server whose model ``m`` is loaded when the test says."""

    def __init__(self, offloader: Offloader) -> None:
        self.core = Core()
        self.core.loads_on_demand = True
        self.core.response_store = None
        self.late = LateModels(self.core.model)
        self.core.model = self.late.model
        self.late.missing = {"m"}
        super().__init__(self.core, offloader)

    async def ask(self, method: bytes, path: str, document: dict[str, Any] | None = None) -> HttpExchange:
        """Send a request, and return when it waits for its model."""
        exchange = HttpExchange(self, method, path.encode(), {}, True)  # type: ignore[arg-type]
        exchange.body = json.dumps(document).encode() if document is not None else b""
        assert self.router.open(exchange) >= len(exchange.body)
        self.router.handle(exchange)
        async with asyncio.timeout(30):
            while not self.late.waiting:
                await asyncio.sleep(0.001)
        return exchange

    def load(self) -> None:
        self.core.load("loaded", 1)
        self.late.load("m")


@pytest.fixture
async def client() -> AsyncIterator[LateClient]:
    offloader = Offloader(1 << 30, 30, ByteBudget(1 << 30))
    yield LateClient(offloader)
    await offloader.close()


@pytest.mark.parametrize(("path", "document"), POSTS, ids=lambda value: "" if isinstance(value, dict) else value)
async def test_request_continues_when_its_model_is_loaded(client: LateClient, path: str, document: dict) -> None:
    await client.ask(b"POST", path, document)
    client.load()
    status, body = await client.response()
    assert (status, "loaded" in body) == (200, True), body[:200]


@pytest.mark.parametrize("path", ["/v2/models/m/config"])
async def test_question_about_a_model_loads_it(client: LateClient, path: str) -> None:
    await client.ask(b"GET", path)
    client.load()
    status, body = await client.response()
    assert status == 200 and '"name":"m"' in body.replace(" ", "")


@pytest.mark.parametrize(("path", "document"), POSTS, ids=lambda value: "" if isinstance(value, dict) else value)
async def test_request_is_told_why_its_model_cannot_be_loaded(client: LateClient, path: str, document: dict) -> None:
    await client.ask(b"POST", path, document)
    client.late.load("m", unavailable("it is broken"))
    status, body = await client.response()
    assert status == 503 and "it is broken" in body


async def test_openai_client_receives_its_own_error_form_for_a_missing_model(client: LateClient) -> None:
    await client.ask(b"POST", "/v1/chat/completions", SMALL_CHAT)
    client.late.load("m", not_found("Request for unknown model: 'm' is not found"))
    status, body = await client.response()
    assert status == 404 and json.loads(body)["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(("path", "document"), POSTS, ids=lambda value: "" if isinstance(value, dict) else value)
async def test_client_that_hangs_up_waits_no_longer(client: LateClient, path: str, document: dict) -> None:
    exchange = await client.ask(b"POST", path, document)
    exchange.disconnect()
    async with asyncio.timeout(30):
        while client.late.waiting:
            await asyncio.sleep(0.001)
    assert client.transport.written == b""
