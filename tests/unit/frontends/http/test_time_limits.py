"""How long a client may take: for heads and bodies, to read its answers, and to ask anything at all."""

import pytest

from conch.frontends.http.server import HttpListener
from conch.frontends.limits import SLOWEST, ClientLimits
from tests.events import until
from tests.unit.frontends.http.site import Client, Site, closed, post, swept, turns

GET = b"GET /p HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize("head", [b"G", b"POST /p HTTP/1.1\r\nHost: x\r\n"])
async def test_a_head_that_does_not_end_has_its_time(
    client: Client, listener: HttpListener, limits: ClientLimits, head: bytes
) -> None:
    client.send(head)
    await swept(listener, 25)
    assert closed(limits) == {}
    await swept(listener, 31)
    status, _, body = await client.response()
    assert status == 408
    assert b"--head-timeout-secs" in body
    assert closed(limits) == {"head": 1}
    assert await client.is_closed()


async def test_bytes_that_drip_in_give_a_head_no_more_time(client: Client, listener: HttpListener) -> None:
    client.send(b"GET /")
    await turns()
    client.send(b"p")
    await swept(listener, 31)
    assert (await client.response())[0] == 408


async def test_a_body_has_its_time_and_more_the_more_of_it_arrives(
    client: Client, site: Site, listener: HttpListener, limits: ClientLimits
) -> None:
    site.limit = 1 << 20
    client.send(post(b"x" * 10 * SLOWEST)[:-1])
    await until(lambda: limits.budget.used == 10 * SLOWEST - 1)
    await swept(listener, 65)
    assert closed(limits) == {}
    await swept(listener, 71)
    assert (await client.response())[0] == 408
    assert closed(limits) == {"body": 1}
    assert limits.budget.used == 0


async def test_a_body_that_the_server_does_not_read_keeps_its_time(
    client: Client, site: Site, listener: HttpListener, limits: ClientLimits
) -> None:
    site.limit = 1 << 20
    limits.budget.take(limits.budget.size)
    client.send(post(b"x" * 100_000)[:-1])
    await swept(listener, 1000)
    assert closed(limits) == {}


async def test_a_request_that_runs_has_any_time(client: Client, site: Site, listener: HttpListener) -> None:
    site.answer = None
    client.send(post(b"x"))
    exchange = await site.next()
    await swept(listener, 1e6)
    exchange.respond(200, [], b"late")
    assert (await client.response())[2] == b"late"


async def test_an_idle_connection_is_closed_in_the_end(
    client: Client, listener: HttpListener, limits: ClientLimits
) -> None:
    client.send(post(b"x"))
    await client.response()
    await swept(listener, 590)
    assert closed(limits) == {}
    await swept(listener, 601)
    assert await client.is_closed()
    assert closed(limits) == {"idle": 1}


async def test_a_connection_on_which_nothing_ever_comes_has_the_time_of_a_head(
    client: Client, listener: HttpListener, limits: ClientLimits
) -> None:
    await swept(listener, 31)
    assert await client.is_closed()
    assert closed(limits) == {"head": 1}


async def test_a_client_that_does_not_read_is_disconnected(
    client: Client, site: Site, listener: HttpListener, limits: ClientLimits
) -> None:
    site.answer = lambda exchange: exchange.respond(200, [], b"x" * 50_000_000)
    client.send(post(b""))
    await until(lambda: limits.budget.used > 10_000_000)
    read = 50_000_000 - limits.budget.used
    await swept(listener, 55)
    assert closed(limits) == {}
    await swept(listener, 65 + read / SLOWEST)
    await until(lambda: closed(limits) == {"unread": 1} and limits.budget.used == 0)


async def test_a_stream_that_is_read_slowly_continues(
    client: Client, site: Site, listener: HttpListener, limits: ClientLimits
) -> None:
    site.answer = None
    client.send(post(b""))
    exchange = await site.next()
    exchange.start(200, [])
    exchange.write(b"x" * 20_000_000)
    await until(lambda: limits.budget.used > 1_000_000)
    for _ in range(10):
        await client.reader.readexactly(1_000_000)
        exchange.write(b"y" * 1_000_000)
        await turns(3)
    # At least 9 MB have gone since the client fell behind: that is worth nine minutes.
    await swept(listener, 60 + 500)
    assert closed(limits) == {}
    await swept(listener, 60 + 50_000_000 / SLOWEST)
    assert closed(limits) == {"unread": 1}
