"""Work for an exchange that takes longer than one turn of the event loop: decoding a large body, loading a model.

Used by the handlers, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Final, TypeVar

from conch.errors import ConchError, internal
from conch.frontends.http.exchange import HttpExchange
from conch.server.model import Model

LOG = logging.getLogger("conch")

#: JSON of more bytes than this is decoded in a thread, so that other clients are served meanwhile.
LARGE_JSON: Final = 1 << 20

T = TypeVar("T")


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

    def decode(
        self,
        exchange: HttpExchange,
        json_size: int,
        decode: Callable[[], T],
        on_decoded: Callable[[T], None],
        model: Model | None = None,
    ) -> None:
        """Call ``on_decoded`` with what ``decode`` returns: at once, or after a thread has decoded large JSON.

        A request is decoded for one ``model``, by its signature.  That version stays loaded meanwhile, even if it is
        unloaded or replaced, so that no other version gets the request.
        """
        if json_size > LARGE_JSON:
            self.start(exchange, self._decode_in_thread(exchange, decode, on_decoded, model))
        else:
            on_decoded(decode())

    async def _decode_in_thread(
        self,
        exchange: HttpExchange,
        decode: Callable[[], T],
        on_decoded: Callable[[T], None],
        model: Model | None,
    ) -> None:
        with nullcontext() if model is None else model.held():
            decoded = await asyncio.to_thread(decode)
            if not exchange.gone:
                on_decoded(decoded)

    async def _run(self, exchange: HttpExchange, work: Awaitable[None]) -> None:
        try:
            await work
        except ConchError as error:
            self._refuse(exchange, error)
        except Exception as error:
            LOG.exception("a request to %s failed", exchange.path.decode("latin-1"))
            self._refuse(exchange, internal(f"{type(error).__name__}: {error}"))
