"""Messages of a call that are compressed elsewhere, and those that must wait behind them.

A call makes an ``Outbox`` when it has the first such message; runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from conch.frontends.grpc.large import compress_large
from conch.tensors import Buffer

#: Sends a message that is encoded: its parts, and their size.
SendParts = Callable[[list[Buffer], int], None]


class Outbox:
    """Sends messages in order; ``size`` counts the bytes of those that are not compressed yet.

    When the last is sent, ``on_empty`` is called, or ``on_error`` if one could not be.
    """

    def __init__(self, encoding: str, on_empty: Callable[[], None], on_error: Callable[[Exception], None]) -> None:
        self.size = 0
        self._encoding = encoding
        self._on_empty = on_empty
        self._on_error = on_error
        self._waiting: deque[tuple[Sequence[Buffer], SendParts]] = deque()
        self._task = asyncio.ensure_future(self._send_all())

    def put(self, body: Sequence[Buffer], send: SendParts) -> None:
        """Have a message compressed, and ``send`` called with it."""
        self.size += sum(map(len, body))
        self._waiting.append((body, send))

    def close(self) -> None:
        """Send nothing more."""
        self._waiting.clear()
        # What is sent may itself end the call.
        if self._task is not asyncio.current_task():
            self._task.cancel()

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                body, send = self._waiting.popleft()
                parts, size = await compress_large(body, self._encoding)
                self.size -= sum(map(len, body))
                send(parts, size)
        except Exception as error:
            self._waiting.clear()
            self._on_error(error)
        else:
            self._on_empty()
