"""A stream of responses whose request waits for its model to be loaded on demand.

Used by ``AsyncServer``; runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from conch.errors import ConchError, unavailable
from conch.library.async_service import AsyncResultStream
from conch.library.deadline import Deadline
from conch.library.results import InferResult
from conch.server.on_demand import LoadNeeded


class LateStream(AsyncResultStream):
    """Becomes the stream that ``send`` makes as soon as the model is loaded, whoever reads it by then."""

    def __init__(self, needed: LoadNeeded, send: Callable[[], AsyncResultStream], deadline: Deadline) -> None:
        self._send = send
        self._deadline = deadline
        self._sent = asyncio.Event()
        self._stream: AsyncResultStream | None = None
        self._error: Exception | None = None
        self._give_up = needed.then(self._begin)

    async def __anext__(self) -> InferResult:
        try:
            async with asyncio.timeout(self._deadline.left()):
                await self._sent.wait()
        except TimeoutError:
            await self.aclose()
            raise unavailable(f"the model was not loaded within {self._deadline.timeout or 0:g} s") from None
        if self._error is not None:
            raise self._error
        if self._stream is None:
            raise StopAsyncIteration
        return await anext(self._stream)

    async def aclose(self) -> None:
        self._give_up()
        self._sent.set()
        if self._stream is not None:
            await self._stream.aclose()

    def _begin(self) -> None:
        """Send the request; called once the model is loaded or cannot be, which ``send`` says."""
        if self._sent.is_set():
            return
        try:
            self._stream = self._send()
        except ConchError as error:
            self._error = error
        self._sent.set()
