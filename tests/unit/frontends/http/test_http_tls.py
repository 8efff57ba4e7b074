"""HTTPS: answers as without, clients that stop in their handshake, and connections that TLS cannot half close."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conch.frontends.budget import ByteBudget
from conch.frontends.http.server import HttpListener
from conch.frontends.limits import ClientLimits, TimeLimits
from conch.frontends.listening import make_context
from conch.options.settings import Settings
from tests.events import until
from tests.unit.frontends.http.site import LIMIT, Client, Site, post


@pytest.fixture
async def encrypted(site: Site, certificates: Path) -> AsyncIterator[HttpListener]:
    settings = Settings(
        http_use_ssl=True,
        http_server_cert=str(certificates / "server.pem"),
        http_server_key=str(certificates / "server.key"),
    )
    limits = ClientLimits(ByteBudget(1 << 20), TimeLimits(head=0.2))
    listener = HttpListener(site, limits, ssl=make_context(settings, "http"))
    listener.address = await listener.start("127.0.0.1", 0)  # type: ignore[attr-defined]
    yield listener
    await listener.stop(0)


async def connected(listener: HttpListener, certificates: Path) -> Client:
    context = ssl.create_default_context(cafile=str(certificates / "server.pem"))
    address = listener.address  # type: ignore[attr-defined]
    return Client(*await asyncio.open_connection(*address, ssl=context))


async def test_requests_are_answered(encrypted: HttpListener, certificates: Path) -> None:
    client = await connected(encrypted, certificates)
    for body in (b"one", b"two" * 100):
        client.send(post(body))
        assert (await client.response())[2] == body
    client.writer.close()


async def test_handshake_that_never_ends_blocks_no_other(encrypted: HttpListener, certificates: Path) -> None:
    address = encrypted.address  # type: ignore[attr-defined]
    stalled = [await asyncio.open_connection(*address) for _ in range(20)]
    stalled[0][1].write(b"\x16\x03\x01\x02\x00\x01")
    stalled[1][1].write(post(b"not encrypted"))
    client = await connected(encrypted, certificates)
    client.send(post(b"meanwhile"))
    assert (await client.response())[2] == b"meanwhile"
    assert len(encrypted.connections) == 1
    for reader, writer in stalled:  # they are closed when their time is over
        try:
            await reader.read()
        except ConnectionError:
            pass
        writer.close()
    client.writer.close()


async def test_request_that_is_refused_early_is_answered_and_the_connection_ends(
    encrypted: HttpListener, certificates: Path
) -> None:
    client = await connected(encrypted, certificates)
    client.send(b"POST /p HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (100 * LIMIT))
    status, headers, body = await client.response()
    assert (status, headers["connection"], body) == (400, "close", b"too large")
    assert await client.is_closed()
    await until(lambda: not encrypted.connections)


async def test_client_that_closes_is_gone(encrypted: HttpListener, site: Site, certificates: Path) -> None:
    site.answer = None
    client = await connected(encrypted, certificates)
    client.send(post(b"x"))
    exchange = await site.next()
    client.writer.close()
    await until(lambda: exchange.gone)
