"""Work for an exchange that takes longer than one turn of the event loop: decoding a large body, loading a model.

Used by the handlers, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from conch.errors import ConchError, internal
from conch.frontends.http.exchange import HttpExchange

LOG = logging.getLogger("conch")

#: JSON of more bytes than this is decoded in a thread, so that other clients are served meanwhile.
LARGE_JSON: Final = 1 << 20
#: A compressed body of more bytes than this may become as much: deflate packs at most 1032 bytes into one.
LARGE_COMPRESSED: Final = LARGE_JSON // 1032


def is_large(exchange: HttpExchange, *, binary: bool = False) -> bool:
    """Whether the body is to be decoded in a thread; that of ``binary`` tensors only if it is compressed."""
    size = len(exchange.body)
    if size <= LARGE_COMPRESSED:
        return False
    return b"content-encoding" in exchange.headers or (size > LARGE_JSON and not binary)


class ExchangeTasks:
    """Runs work for exchanges; ``refuse`` answers one whose work fails."""

    def __init__(self, refuse: Callable[[HttpExchange, ConchError], None]) -> None:
        self._refuse = refuse
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, exchange: HttpExchange, work: Awaitable[None]) -> None:
        """Run ``work``, which answers the exchange unless it raises."""
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
