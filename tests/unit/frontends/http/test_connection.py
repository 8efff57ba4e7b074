"""HTTP over a real socket, in front of an application that the test controls."""

import asyncio

import pytest

from conch.core.errors import ConchError
from conch.frontends.http import reader as module
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.server import HttpListener
from conch.frontends.limits import ClientLimits
from tests.events import TIMEOUT
from tests.unit.frontends.http.site import Client, Site, post


async def test_connection_serves_one_request_after_the_other(client: Client, site: Site) -> None:
    for body in (b"one", b"two"):
        client.send(post(body))
        assert (await client.response())[2] == body
    assert site.exchanges[0].path == b"/p"


async def test_pipelined_requests_are_answered_in_order(client: Client, site: Site) -> None:
    site.answer = None
    client.send(post(b"one") + post(b"two"))
    first = await site.next()
    assert first.body == b"one"
    assert len(site.exchanges) == 1
    first.respond(200, [], b"1")
    second = await site.next()
    second.respond(200, [], b"2")
    assert [(await client.response())[2], (await client.response())[2]] == [b"1", b"2"]


async def test_chunked_body_arrives_whole(client: Client) -> None:
    client.send(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
    assert (await client.response())[2] == b"abcde"


async def test_large_response_arrives_whole(client: Client, site: Site) -> None:
    parts = [b"a" * 100_000, b"b" * 2_000_000]
    site.answer = lambda exchange: exchange.respond(200, [], *parts)
    client.send(post(b""))
    assert (await client.response())[2] == b"".join(parts)


async def test_streamed_response_is_chunked(client: Client, site: Site) -> None:
    def answer(exchange: HttpExchange) -> None:
        exchange.start(200, [(b"content-type", b"text/event-stream")])
        exchange.write(b"one")
        exchange.write(b"two")
        exchange.finish()

    site.answer = answer
    client.send(post(b""))
    assert (await client.response())[2] == b"onetwo"


async def test_client_that_expects_it_is_told_to_continue(client: Client) -> None:
    client.send(b"POST / HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
    assert (await client.response())[0] == 100
    client.send(b"abc")
    assert (await client.response())[2] == b"abc"


@pytest.mark.parametrize(
    "head", [b"Content-Length: 1001\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001]
)
async def test_body_beyond_the_limit_is_refused_and_the_connection_closed(
    client: Client, site: Site, head: bytes
) -> None:
    client.send(b"POST / HTTP/1.1\r\n" + head)
    status, _, body = await client.response()
    assert (status, body) == (400, b"too large")
    assert await client.is_closed()
    assert site.exchanges == []


async def test_too_many_chunks_are_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHUNKS", 3)
    client.send(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 4)
    status, _, body = await client.response()
    assert status == 400
    assert b"Chunked request body exceeds maximum" in body


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 700_000,
        b"GET / HTTP/1.1\r\nX: " + b"y" * 700_000,
        b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 200_000,
    ],
    ids=["target", "header", "headers"],
)
async def test_head_without_an_end_is_refused(client: Client, head: bytes) -> None:
    client.send(head)
    assert (await client.response())[0] == 431


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"FOO BAR\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ],
)
async def test_what_is_not_http_gets_400(client: Client, garbage: bytes) -> None:
    client.send(garbage)
    assert (await client.response())[0] == 400
    assert await client.is_closed()


async def test_client_that_hangs_up_is_noticed_and_its_answer_dropped(client: Client, site: Site) -> None:
    site.answer = None
    gone = asyncio.Event()
    client.send(post(b""))
    exchange = await site.next()
    exchange.on_disconnect = gone.set
    client.writer.close()
    await asyncio.wait_for(gone.wait(), TIMEOUT)
    exchange.respond(200, [], b"nobody hears this")


async def test_hanging_up_cancels_pipelined_requests_too(client: Client, site: Site) -> None:
    site.answer = None
    client.send(post(b"one") + post(b"two"))
    exchange = await site.next()
    gone = asyncio.Event()
    exchange.on_disconnect = gone.set
    client.writer.close()
    await asyncio.wait_for(gone.wait(), TIMEOUT)
    exchange.respond(200, [])
    assert len(site.exchanges) == 1


async def test_connection_close_is_honoured(client: Client) -> None:
    client.send(post(b"x", b"Connection: close"))
    _, headers, _ = await client.response()
    assert headers["connection"] == "close"
    assert await client.is_closed()


async def test_shutdown_lets_a_due_answer_out_and_closes(client: Client, site: Site, listener: HttpListener) -> None:
    site.answer = None
    client.send(post(b""))
    exchange = await site.next()
    stopping = asyncio.ensure_future(listener.stop(5))
    await asyncio.sleep(0)
    exchange.respond(200, [], b"late")
    assert (await client.response())[2] == b"late"
    assert await client.is_closed()
    await stopping


async def test_shutdown_closes_idle_connections(client: Client, listener: HttpListener) -> None:
    client.send(post(b"x"))
    await client.response()
    await listener.stop(5)
    assert await client.is_closed()


async def test_port_that_is_taken_is_an_error(site: Site, limits: ClientLimits, listener: HttpListener) -> None:
    other = HttpListener(site, limits)
    with pytest.raises(ConchError, match="already in use"):
        await other.start(*listener.address)  # type: ignore[attr-defined]


async def test_offer_of_another_protocol_is_declined_by_answering(client: Client) -> None:
    client.send(post(b"one", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: x"))
    assert (await client.response())[2] == b"one"
    client.send(post(b"two"))
    assert (await client.response())[2] == b"two"


async def test_answer_to_head_has_no_body(client: Client) -> None:
    client.send(b"HEAD /p HTTP/1.1\r\n\r\n")
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert b"200" in head
    client.send(post(b"next"))
    assert (await client.response())[2] == b"next"


async def test_trailers_change_nothing_and_are_bounded(client: Client, site: Site) -> None:
    chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nA: 1\r\n\r\n1\r\nx\r\n0\r\n"
    client.send(chunked + b"A: 2\r\n\r\n")
    await client.response()
    assert site.exchanges[0].headers[b"a"] == b"1"
    client.send(chunked + b"B: " + b"y" * 100 + b"\r\n")
    client.send((b"C: " + b"z" * 1000 + b"\r\n") * 1000)
    assert (await client.response())[0] == 431


async def test_client_that_reads_nothing_is_not_served_on_and_on(client: Client, site: Site) -> None:
    site.answer = lambda exchange: exchange.respond(200, [], b"x" * 1_000_000)
    client.send(post(b"") * 50)
    while not site.exchanges or len(site.exchanges) < 2:
        await asyncio.sleep(0.01)
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert len(site.exchanges) < 50
    for _ in range(50):
        assert len((await client.response())[2]) == 1_000_000
    assert len(site.exchanges) == 50


async def test_client_that_sends_nothing_more_is_answered_what_waited_for_its_turn(client: Client) -> None:
    client.send(post(b"x" * 50) * 300)
    client.writer.write_eof()
    for _ in range(300):
        assert (await client.response())[0] == 200
    assert await client.is_closed()


@pytest.mark.parametrize(
    ("head", "version"), [(b"GET /p\r\n\r\n", b"0.9"), (b"GET /p HTTP/2.0\r\nHost: x\r\n\r\n", b"2.0")]
)
async def test_other_versions_of_http_are_refused(client: Client, site: Site, head: bytes, version: bytes) -> None:
    client.send(head)
    assert (await client.response())[::2] == (505, b"HTTP %b is not supported: use HTTP/1.1" % version)
    assert await client.is_closed()
    assert site.exchanges == []


@pytest.mark.parametrize("keeps_names", [False, True])
async def test_names_of_headers_are_kept_as_sent_where_they_are_wanted(
    listener: HttpListener, site: Site, keeps_names: bool
) -> None:
    site.keeps_names = keeps_names
    reader, writer = await asyncio.open_connection(*listener.address)  # type: ignore[attr-defined]
    client = Client(reader, writer)
    for name in (b"X-Mine", b"x-YOURS"):
        client.send(post(b"", name + b": 1"))
        await client.response()
        assert site.exchanges[-1].headers[name.lower()] == b"1"
        assert site.exchanges[-1].names.get(name.lower()) == (name if keeps_names else None)
    assert b"x-mine" not in site.exchanges[-1].names
    writer.close()
