"""Background tasks for exchanges: work that takes longer than one iteration of the event loop.

Used by the handlers, for example to decode a large body or to load a model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from conch.core.errors import ConchError, internal
from conch.core.tensors import Buffer
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.offloading.pool import LARGE
from conch.wire import compression

LOG = logging.getLogger("conch")


def content_encoding(exchange: HttpExchange) -> str:
    """Return the value of ``Content-Encoding``, empty if missing."""
    return exchange.headers.get(b"content-encoding", b"").decode("latin-1")


def small_body(exchange: HttpExchange, limit: int) -> Buffer | None:
    """Return the decompressed body, or None if it is large; ``limit`` is the maximum of the settings (bytes).

    Raises the errors of :func:`conch.wire.compression.decompress`.
    """
    body = exchange.body
    if len(body) > LARGE:
        return None
    if b"content-encoding" not in exchange.headers or compression.is_identity(encoding := content_encoding(exchange)):
        return body
    return (
        compression.decompress_limited(body, encoding, LARGE)
        if limit > LARGE
        else compression.decompress(body, encoding, limit)
    )


@contextmanager
def given_up_by_client(exchange: HttpExchange) -> Iterator[None]:
    """Cancel the current task if the client of ``exchange`` disconnects during the block."""
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        task.cancel()

    exchange.on_disconnect = cancel
    try:
        yield
    finally:
        exchange.on_disconnect = None


class ExchangeTasks:
    """Runs background tasks for exchanges; ``refuse`` responds if one fails."""

    def __init__(self, refuse: Callable[[HttpExchange, ConchError], None]) -> None:
        self._refuse = refuse
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, exchange: HttpExchange, work: Awaitable[None]) -> None:
        """Run ``work``, which responds to the exchange unless it raises."""
        exchange.worked_for = True
        task = asyncio.get_running_loop().create_task(self._run(exchange, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, exchange: HttpExchange, work: Awaitable[None]) -> None:
        try:
            await work
        except ConchError as error:
            self._refuse(exchange, error)
        except Exception as error:
            LOG.exception("a request to %s failed", exchange.path.decode("latin-1"))
            self._refuse(exchange, internal(f"{type(error).__name__}: {error}"))
        finally:
            exchange.worked_for = False
            if exchange.gone:
                exchange.let_go()
