"""Tests of connections run on the server's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from conch.frontends.budget import ByteBudget
from conch.frontends.http.server import HttpListener
from conch.frontends.limits import ClientLimits, TimeLimits
from tests.unit.frontends.http.site import Client, Site


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop; with asyncio's loop of Python 3.12.1 ``writelines`` never pauses who writes."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def site() -> Site:
    return Site()


@pytest.fixture
async def limits() -> ClientLimits:
    return ClientLimits(ByteBudget(1 << 20), TimeLimits(head=30, body=60, unread=60, idle=600))


@pytest.fixture
async def listener(site: Site, limits: ClientLimits, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HttpListener]:
    """Listens; only tests sweep its connections."""
    monkeypatch.setattr("conch.frontends.http.server.SWEEP_SECONDS", 1e9)
    listener = HttpListener(site, limits)
    listener.address = await listener.start("127.0.0.1", 0)  # type: ignore[attr-defined]
    yield listener
    await listener.stop(0)


@pytest.fixture
async def client(listener: HttpListener) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(*listener.address)  # type: ignore[attr-defined]
    yield Client(reader, writer)
    writer.close()
