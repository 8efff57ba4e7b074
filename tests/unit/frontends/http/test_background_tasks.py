"""Work for exchanges: done at once if it can be, otherwise in a task that ends with its client."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from conch.core.errors import unavailable
from conch.frontends.http.background_tasks import start_work
from conch.frontends.http.exchange import HttpExchange
from tests.unit.fake_clock import settle
from tests.unit.frontends.http.site import WrittenConnection


class Body(bytearray):
    """A body that can be weakly referenced."""


@pytest.fixture
def connection() -> Any:
    return WrittenConnection()


@pytest.fixture
def exchange(connection: Any) -> HttpExchange:
    return HttpExchange(connection, b"POST", b"/", {}, True)


async def test_work_that_does_not_wait_is_done_without_a_task(exchange: HttpExchange, connection: Any) -> None:
    async def work() -> None:
        exchange.respond(200, [])

    before = asyncio.all_tasks()
    start_work(exchange, work())
    assert connection.ended == 1 and asyncio.all_tasks() == before


async def test_work_that_waits_continues_with_what_it_waited_for(exchange: HttpExchange, connection: Any) -> None:
    results: list[asyncio.Future[bytes]] = [asyncio.get_running_loop().create_future() for _ in range(2)]

    async def work() -> None:
        exchange.respond(200, [], *[await result for result in results])

    start_work(exchange, work())
    for number, result in enumerate(results):
        assert not connection.ended
        result.set_result(b"%d" % number)
        await settle()
    assert connection.written.endswith(b"\r\n\r\n01")


async def test_client_that_disconnects_cancels_work_that_waits(exchange: HttpExchange) -> None:
    seen: list[str] = []

    @contextmanager
    def held() -> Iterator[None]:
        seen.append("held")
        yield
        seen.append("released")

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    start_work(exchange, work(), cancel_on_disconnect=True, held=held)
    exchange.disconnect()  # even before the task has taken its first step
    await settle()
    assert seen[:2] == ["held", "cancelled"] and not exchange.worked_for


async def test_client_that_disconnects_when_the_wait_has_just_ended_cancels_the_work(exchange: HttpExchange) -> None:
    result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ends: list[bool] = []

    async def work() -> None:
        try:
            await result
            ends.append(True)
        except asyncio.CancelledError:
            ends.append(False)
            raise

    start_work(exchange, work(), cancel_on_disconnect=True)
    await settle()
    # The loop handles the disconnection in the iteration in which the work would go on.
    result.set_result(None)
    exchange.disconnect()
    await settle()
    assert ends == [False] and not exchange.worked_for


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.usefixtures("no_collector")
async def test_body_of_work_that_fails_is_freed_at_once(exchange: HttpExchange, cancelled: bool) -> None:
    async def work(body: Body) -> None:
        await results.pop()  # in a variable here, the future would refer to itself through its error

    body = Body(b"large")
    freed = weakref.ref(body)
    result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    results = [result]
    start_work(exchange, work(body), cancel_on_disconnect=True)
    del body
    assert freed() is not None
    if cancelled:
        exchange.disconnect()
    else:
        result.set_exception(unavailable("busy"))
    del result
    await settle()
    assert freed() is None


async def test_unexpected_error_is_logged_and_not_shown(
    exchange: HttpExchange, connection: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        raise ValueError("secret")

    start_work(exchange, work())
    assert connection.written.startswith(b"HTTP/1.1 500 ") and b"secret" not in connection.written
    assert "secret" in caplog.text


@pytest.mark.parametrize("error", [unavailable("busy"), ValueError("secret")])
async def test_error_after_the_beginning_of_a_response_ends_the_connection(
    exchange: HttpExchange, connection: Any, error: Exception
) -> None:
    async def work() -> None:
        raise error

    exchange.start(200, [])
    exchange.write(b"part")
    written = connection.written
    start_work(exchange, work())
    assert connection.aborted and connection.written == written
