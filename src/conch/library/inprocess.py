"""Runs requests on a server in the same process, without a network protocol.

Used by ``AsyncServer``; runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final

from conch.client.requests import OutgoingRequest
from conch.client.results import InferResult
from conch.client.service import AsyncResultStream
from conch.client.values import decode
from conch.core.errors import ConchError, internal, unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.server.model import Model

#: Maximum size of unread responses before their request is cancelled, as over gRPC (bytes).
UNREAD_LIMIT: Final = 512 << 20


class HeldModel:
    """Keeps a model loaded until released or garbage-collected in any thread. Created on the event loop."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._loop = asyncio.get_running_loop()
        self._hold = ExitStack()
        self._hold.enter_context(model.held())
        self.released = False

    def release(self) -> None:
        """Allow the model to be unloaded once its requests have completed; called on the event loop."""
        self.released = True
        self._hold.close()

    def __del__(self) -> None:
        if not self.released:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._hold.close)


async def infer(model: Model, outgoing: OutgoingRequest) -> InferResult:
    """Return the only response to a request; cancelling the call cancels the request.

    Raises UNAVAILABLE at the request's deadline and cancels the request.
    """
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    responses: list[InferResponse] = []

    def on_response(response: InferResponse) -> None:
        if not response.empty or (response.final and not responses):
            responses.append(response)
        if response.final and not ended.done():
            ended.set_result(None)

    request = _submit(model, outgoing, on_response)
    try:
        async with asyncio.timeout(outgoing.deadline.left()):
            await ended
    except TimeoutError:
        request.cancel()
        raise outgoing.not_in_time() from None
    except asyncio.CancelledError:
        request.cancel()
        raise
    if len(responses) != 1:
        raise internal(f"expected a single response, got {len(responses)}")
    return _result(request, responses[0])


class LocalStream(AsyncResultStream):
    """The responses to an in-process request, which is sent when the stream is created, on the event loop."""

    def __init__(self, model: Model, outgoing: OutgoingRequest) -> None:
        self._loop = asyncio.get_running_loop()
        self._outgoing = outgoing
        # The request refers only to the inbox, so that an abandoned stream is garbage-collected.
        self._inbox = _Inbox(decoupled=model.signature.decoupled)
        self._request = _submit(model, outgoing, self._inbox.put)
        self._inbox.request = self._request

    async def __anext__(self) -> InferResult:
        result = await self.next()
        if result is None:
            raise StopAsyncIteration
        return result

    async def next(self) -> InferResult | None:
        """Return the next response, or None at the end."""
        try:
            async with asyncio.timeout(self._outgoing.deadline.left()):
                response = await self._inbox.take()
        except TimeoutError:
            self._request.cancel()
            self._inbox.end()
            raise self._outgoing.not_in_time() from None
        if response is None:
            return None
        try:
            return _result(self._request, response)
        except ConchError:
            self._cancel()
            raise

    async def aclose(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        self._request.cancel()
        self._inbox.end()

    def __del__(self) -> None:
        request = getattr(self, "_request", None)
        if request is not None and not request.finished and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(request.cancel)  # the garbage collector runs in any thread


class _Inbox:
    """Responses that have arrived and have not been read."""

    request: InferRequest

    def __init__(self, *, decoupled: bool) -> None:
        self._decoupled = decoupled
        self._responses: deque[InferResponse] = deque()
        self._received = False
        self._bytes = 0
        self._ended = False
        self._news = asyncio.Event()

    def put(self, response: InferResponse) -> None:
        """Keep a response; called by the request, on the event loop."""
        if self._ended:
            return
        # A model that is not decoupled may have made no outputs: its only response is empty then.
        if not response.empty or (response.final and not self._received and not self._decoupled):
            self._responses.append(response)
            self._received = True
            self._bytes += _size(response)
        self._ended = response.final
        if self._bytes > UNREAD_LIMIT and not self._ended:
            self._ended = True
            reason = f"more than {UNREAD_LIMIT >> 20} MiB of responses were not read"
            self._responses.append(InferResponse(error=unavailable(reason)))
            self.request.cancel()
        self._news.set()

    async def take(self) -> InferResponse | None:
        """Wait for the next response and return it, or None at the end. Several tasks may wait."""
        while not self._responses:
            if self._ended:
                return None
            self._news.clear()
            await self._news.wait()
        response = self._responses.popleft()
        self._bytes -= _size(response)
        return response

    def end(self) -> None:
        """Discard all responses."""
        self._ended = True
        self._responses.clear()
        self._news.set()


def _submit(model: Model, outgoing: OutgoingRequest, on_response: Callable[[InferResponse], None]) -> InferRequest:
    if outgoing.parameters and model.signature.check_parameters is not None:
        model.signature.check_parameters(outgoing.parameters)
    request = outgoing.to_infer_request(on_response, model.version)
    model.infer(request)
    return request


def _result(request: InferRequest, response: InferResponse) -> InferResult:
    """Convert a response to a result, or raise its error."""
    if response.error is not None:
        raise response.error
    requested = request.outputs
    return InferResult(
        request.model_name,
        str(request.model_version),
        {tensor.name: decode(tensor) for tensor in response.outputs if not requested or tensor.name in requested},
        request.id,
        response.parameters,
    )


def _size(response: InferResponse) -> int:
    return sum(len(tensor.data) for tensor in response.outputs)
