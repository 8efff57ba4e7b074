"""Limits for clients: unread bodies, the byte budget, event-loop time, connections, memory."""

import asyncio
import weakref
from time import monotonic, sleep

import pytest

from conch.frontends.admission import Admission
from conch.frontends.budget import SMALL
from conch.frontends.http.reader import MAX_IGNORED_BODY
from conch.frontends.http.server import MAX_PIPELINED, HttpConnection, HttpListener
from conch.frontends.limits import ClientLimits
from conch.frontends.loop_budget import SHARE
from tests.events import until
from tests.unit.frontends.http.site import Client, Site, closed, post, swept, turns

GET = b"GET /p HTTP/1.1\r\n\r\n"


class Part:
    """Something that an exchange has, and that can be referred to weakly."""


class Watched:
    """The last exchange of a site, which forgets it."""

    def __init__(self, site: Site) -> None:
        exchange = site.exchanges.pop()
        exchange.route = Part()
        self._part = weakref.ref(exchange.route)

    def gone(self) -> bool:
        return self._part() is None


# Decided from the head


async def test_a_request_that_is_refused_for_its_head_is_answered_behind_a_small_body(
    client: Client, site: Site, limits: ClientLimits
) -> None:
    site.refuses = "no"
    client.send(post(b"x" * 1000))
    assert (await client.response())[::2] == (403, b"no")
    site.refuses = None
    client.send(post(b"next"))
    assert (await client.response())[2] == b"next"
    assert [bytes(exchange.body) for exchange in site.exchanges] == [b""]  # the one that was handled, and is over
    assert limits.budget.used == 0


async def test_a_request_that_is_refused_for_its_head_is_answered_before_a_large_body(
    client: Client, site: Site, limits: ClientLimits
) -> None:
    site.refuses = "no"
    client.send(b"POST /p HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_IGNORED_BODY + 1))
    status, headers, body = await client.response()
    assert (status, body, headers["connection"]) == (403, b"no", "close")
    assert await client.is_closed()


async def test_a_refused_body_of_unknown_length_is_not_read_to_its_end(client: Client, site: Site) -> None:
    site.refuses = "no"
    client.send(b"POST /p HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    client.send((b"4000\r\n" + b"x" * 0x4000 + b"\r\n") * 5)
    assert (await client.response())[0] == 403
    assert await client.is_closed()


async def test_no_client_is_told_to_continue_with_a_body_that_is_refused(client: Client, site: Site) -> None:
    site.refuses = "no"
    client.send(b"POST /p HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
    assert (await client.response())[0] == 403
    assert await client.is_closed()


async def test_answers_that_are_due_come_before_a_refusal(client: Client, site: Site) -> None:
    site.answer = None
    client.send(post(b"one") + post(b"two") + b"garbage\r\n\r\n")
    first = await site.next()
    await turns()
    first.respond(200, [], b"1")
    (await site.next()).respond(200, [], b"2")
    answers = [await client.response() for _ in range(3)]
    assert [status for status, _, _ in answers] == [200, 200, 400]
    assert await client.is_closed()


async def test_a_client_that_keeps_sending_sees_why_it_was_refused(client: Client, site: Site) -> None:
    site.limit = 1 << 30
    site.refuses = "no"
    client.send(b"POST /p HTTP/1.1\r\nContent-Length: 50000000\r\n\r\n")
    client.send(b"x" * 10_000_000)
    assert (await client.response())[::2] == (403, b"no")


async def test_a_refused_client_that_keeps_sending_is_hung_up_on(
    client: Client, site: Site, listener: HttpListener
) -> None:
    site.limit = 1 << 30
    site.refuses = "no"
    before = monotonic()
    client.send(b"POST /p HTTP/1.1\r\nContent-Length: 50000000\r\n\r\n")
    assert (await client.response())[0] == 403
    for _ in range(5):
        client.send(b"x")
        await turns()
    (connection,) = listener.connections
    listener.sweep(before + 1.9)
    assert not connection.transport.is_closing()
    await swept(listener, 2.1)
    assert connection.transport.is_closing()


# Turns


async def test_one_connection_has_one_request_in_a_turn_of_the_loop(client: Client, site: Site) -> None:
    loop = asyncio.get_running_loop()
    turn, seen = 0, []

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if len(seen) < 1000:
            loop.call_soon(next_turn)

    next_turn()
    site.answer = lambda exchange: (seen.append(turn), exchange.respond(200, []))[0]
    client.send(GET * 1000)
    for _ in range(1000):
        await client.response()
    assert len(seen) == 1000
    assert len(set(seen)) > 900  # a read may bring one and the loop another in the same turn


class Transport:
    """As much of a transport as a connection needs that is fed by hand."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> None:
        return None


async def test_connections_share_a_turn_of_the_loop_and_health_does_not_wait(site: Site, limits: ClientLimits) -> None:
    connections = [HttpConnection(site, set(), limits) for _ in range(4)]  # type: ignore[arg-type]
    transports = [Transport() for _ in connections]
    for connection, transport in zip(connections, transports, strict=True):
        connection.connection_made(transport)  # type: ignore[arg-type]
    site.answer = lambda exchange: (sleep(2 * SHARE), exchange.respond(200, []))[1]
    for connection in connections[:3]:
        connection.data_received(GET)
    site.urgent = True
    connections[3].data_received(GET)
    # All of it happens in one turn: two took its time, the third waits, and the last is not kept.
    assert [bool(transport.written) for transport in transports] == [True, True, False, True]
    await until(lambda: transports[2].written)


async def test_requests_beyond_those_that_may_wait_are_not_parsed(client: Client, site: Site) -> None:
    site.answer = None
    site.opened = 0
    client.send(GET * 10_000)
    exchange = await site.next()
    await turns()
    assert site.opened < MAX_PIPELINED + 4096 / len(GET) + 2
    site.answer = lambda exchange: exchange.respond(200, [])
    exchange.respond(200, [])
    for _ in range(10_000):
        await client.response()


# The budget


async def test_bodies_count_until_they_are_answered(client: Client, site: Site, limits: ClientLimits) -> None:
    site.answer = None
    client.send(post(b"x" * 700) + post(b"y" * 300))
    exchange = await site.next()
    await until(lambda: limits.budget.used == 1000)
    exchange.respond(200, [])
    assert limits.budget.used == 300
    client.writer.close()
    await until(lambda: limits.budget.used == 0)


async def test_a_body_that_a_task_works_with_counts_until_the_task_ends(
    client: Client, site: Site, limits: ClientLimits
) -> None:
    site.answer = None
    client.send(post(b"x" * 700))
    exchange = await site.next()
    exchange.worked_for = True
    client.writer.close()
    await until(lambda: exchange.gone)
    assert limits.budget.used == len(exchange.body) == 700
    exchange.let_go()
    assert limits.budget.used == len(exchange.body) == 0


async def test_a_large_body_waits_while_the_budget_is_used_up(client: Client, site: Site, limits: ClientLimits) -> None:
    site.limit = 1 << 20
    limits.budget.take(limits.budget.size)
    client.send(post(b"x" * (SMALL + 1)))
    await turns()
    assert site.exchanges == []
    limits.budget.release(limits.budget.size)
    assert len((await client.response())[2]) == SMALL + 1


async def test_small_requests_are_served_while_the_budget_is_used_up(
    client: Client, site: Site, limits: ClientLimits
) -> None:
    limits.budget.take(limits.budget.size)
    client.send(post(b"x"))
    assert (await client.response())[2] == b"x"


@pytest.mark.parametrize("missing", [0, 10_000])
async def test_a_body_for_which_there_is_never_room_is_refused(
    client: Client, site: Site, limits: ClientLimits, missing: int
) -> None:
    site.limit = 1 << 20
    limits.budget.timeout = 0
    limits.budget.take(limits.budget.size)
    client.send(post(b"x" * 100_000)[: -missing or None])
    status, _, body = await client.response()
    assert status == 503
    assert b"--max-bytes-in-flight" in body
    assert limits.budget.used == limits.budget.size
    assert site.exchanges == []


async def test_a_body_that_is_larger_than_the_budget_is_refused_at_once(
    client: Client, site: Site, limits: ClientLimits
) -> None:
    site.limit = 1 << 30
    client.send(b"POST /p HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (limits.budget.size + 1))
    status, _, body = await client.response()
    assert status == 400
    assert b"--max-bytes-in-flight" in body


async def test_answers_that_are_not_read_count(client: Client, site: Site, limits: ClientLimits) -> None:
    site.answer = lambda exchange: exchange.respond(200, [], b"x" * 50_000_000)
    client.send(post(b""))
    await until(lambda: limits.budget.used > 10_000_000)
    assert len((await client.response())[2]) == 50_000_000
    await until(lambda: limits.budget.used == 0)


# Connections


async def test_a_server_that_is_full_answers_for_its_health_alone(
    site: Site, listener: HttpListener, limits: ClientLimits
) -> None:
    limits.admission = Admission(1, limits.counts)
    first, second, third = [Client(*await asyncio.open_connection(*listener.address)) for _ in range(3)]  # type: ignore[attr-defined]
    second.send(post(b"x"))
    status, headers, body = await second.response()
    assert (status, headers["connection"]) == (503, "close")
    assert b"--max-connections" in body
    site.urgent = True
    third.send(GET)
    status, headers, _ = await third.response()
    assert (status, headers["connection"]) == (200, "close")
    site.urgent = False
    first.send(post(b"x"))
    assert (await first.response())[0] == 200
    assert closed(limits) == {"connections": 2}
    for client in (first, second, third):
        client.writer.close()


async def test_who_has_no_place_does_not_stay(listener: HttpListener, limits: ClientLimits) -> None:
    limits.admission = Admission(1, limits.counts)
    clients = [Client(*await asyncio.open_connection(*listener.address)) for _ in range(2)]  # type: ignore[attr-defined]
    await swept(listener, 3)
    assert await clients[1].is_closed()
    assert len(listener.connections) == 1
    for client in clients:
        client.writer.close()


# Memory


@pytest.mark.usefixtures("no_collector")
async def test_an_exchange_that_was_answered_is_gone_while_its_connection_is_idle(client: Client, site: Site) -> None:
    client.send(post(b"one"))
    await client.response()
    exchange = Watched(site)
    assert exchange.gone()


@pytest.mark.usefixtures("no_collector")
async def test_an_exchange_is_gone_whose_client_has_hung_up(client: Client, site: Site) -> None:
    site.answer = None
    client.send(post(b"one") + post(b"two"))
    await site.next()
    site.exchanges[-1].on_disconnect = lambda: None
    exchange = Watched(site)
    assert not exchange.gone()
    client.writer.close()
    await until(exchange.gone)


@pytest.mark.usefixtures("no_collector")
async def test_nothing_is_left_of_a_connection_that_has_ended(
    client: Client, site: Site, listener: HttpListener
) -> None:
    client.send(post(b"one"))
    await client.response()
    (connection,) = map(weakref.ref, listener.connections)
    client.writer.close()
    await until(lambda: connection() is None)
