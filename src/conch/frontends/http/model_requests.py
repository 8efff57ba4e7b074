"""Requests whose body, or path, names a model: decodes and starts them, and joins the responses of the model.

Used by the handlers of the OpenAI API and of retrieval, on the event loop; a process decodes large bodies. An exchange
may become several requests to its model. It ends when all have completed or the first one fails; if the client
disconnects, they are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import Any, Final

from conch.core.errors import Code, ConchError, internal
from conch.core.inference import InferRequest, InferResponse, ModelSignature
from conch.core.tensors import WireTensor
from conch.frontends.http.background_tasks import start_work, take_body
from conch.frontends.http.dialects import refuse
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.offloading.offloader import Offloader
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.server.models.on_demand import LoadNeeded
from conch.telemetry.tracing.trace import HTTP
from conch.telemetry.tracing.tracing import Tracing

LOG = logging.getLogger("conch")

_CALLER: Final = (b"traceparent", b"tracestate")


def observe(tracing: Tracing, exchange: HttpExchange, request: InferRequest) -> None:
    """Begin the trace of a request, if it is sampled, before its model gets it; identify it in the access log."""
    if tracing.on:
        _begin_trace(tracing, exchange, request)
    if exchange.record is not None:
        exchange.record.identify(request)


def _begin_trace(tracing: Tracing, exchange: HttpExchange, request: InferRequest) -> None:
    headers = {
        name.decode(): value.decode("latin-1") for name in _CALLER if (value := exchange.headers.get(name)) is not None
    }
    # Missing if tracing was enabled while the body arrived.
    tracing.begin(request, HTTP, getattr(exchange, "began", monotonic_ns()), headers)


class RequestsResponder:
    """Sends requests and handles their responses until the exchange ends."""

    def __init__(self, exchange: HttpExchange, requests: Sequence[InferRequest]) -> None:
        self._exchange = exchange
        self._requests = requests
        for part, request in enumerate(requests):
            request.on_response = partial(self._on_response, part)
        self._model = requests[0].model_name
        self._running = len(requests)
        self._ended = False

    def start(self, model: Model, tracing: Tracing) -> None:
        """Send all requests; if one is refused, cancel the others and raise the error."""
        try:
            for request in self._requests:
                if self._ended:
                    return
                observe(tracing, self._exchange, request)
                model.infer(request)
        except BaseException:
            self.cancel()
            raise
        if not self._ended:
            self._exchange.on_disconnect = self.cancel

    def cancel(self) -> None:
        """Cancel all requests and send nothing more to the client."""
        self._ended = True
        for request in self._requests:
            request.cancel()

    def _on_response(self, part: int, response: InferResponse) -> None:
        if self._ended:
            return
        try:
            if response.error is not None:
                raise self._client_error(part, response.error)
            self._take(part, response)
            if response.final:
                self._running -= 1
                if not self._running:
                    self._ended = True
                    self._finish()
        except ConchError as error:
            self._fail(error)
        except Exception:
            LOG.exception("a response of '%s' could not be written", self._model)
            self._fail(internal("the response could not be written"))

    def _fail(self, error: ConchError) -> None:
        self.cancel()
        refuse(self._exchange, error)

    def _client_error(self, part: int, error: ConchError) -> ConchError:
        """Return the client's error for an error of request number ``part``."""
        return error

    def _take(self, part: int, response: InferResponse) -> None:
        """Write or keep a response to request number ``part``; ``ConchError`` fails the exchange."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Send or end the response; called when all requests have completed without error."""
        raise NotImplementedError


class JoinedResponder(RequestsResponder):
    """Responds with one body, from the outputs of all requests, when they have completed."""

    def __init__(self, exchange: HttpExchange, requests: Sequence[InferRequest], offloader: Offloader) -> None:
        super().__init__(exchange, requests)
        self._offloader = offloader
        self._parts: list[Sequence[WireTensor]] = [()] * len(requests)

    def _take(self, part: int, response: InferResponse) -> None:
        if response.outputs:
            self._parts[part] = response.outputs

    def _finish(self) -> None:
        start_work(self._exchange, self._encode(), cancel_on_disconnect=True)

    async def _encode(self) -> None:
        """Encode and send the response."""
        raise NotImplementedError

    @property
    def _size(self) -> int:
        """The size of the outputs (bytes)."""
        return sum([len(tensor.data) for part in self._parts for tensor in part])


@dataclass(frozen=True, slots=True)
class Translation:
    """The translation of an endpoint: from a body to requests, and from their responses to its response.

    ``decode``, a function of ``work``, is called with the body, its encoding, the maximum size, a function that returns
    the signature of a model, and ``arguments``. It returns a plan and the inputs of each request, for which ``respond``
    creates the responder. ``find`` returns the model for the argument with which ``decode`` calls that function; its
    errors refuse the exchange. An argument may be a function that raises EntryNeeded, which ``decode`` calls before it.
    """

    decode: Callable[..., Any]
    arguments: tuple[Any, ...]
    find: Callable[[Any], Model]
    respond: Callable[[HttpExchange, Model, Any, list[dict[str, WireTensor]]], RequestsResponder]


class EntryNeeded(ConchError):
    """Stored or fetched data must be read; the caller can wait for it and call again. ``read`` returns its size."""

    def __init__(self, read: Callable[[], Coroutine[Any, Any, int]]) -> None:
        super().__init__("an entry must be read", Code.UNAVAILABLE)
        self._read = read

    async def wait(self) -> int:
        """Read the data, and return its size (bytes)."""
        return await asyncio.create_task(self._read())  # timeouts need a task, which an exchange may not have yet


class ModelRequests:
    """Decodes the bodies of exchanges and starts their requests."""

    def __init__(self, server: InferenceServer, offloader: Offloader) -> None:
        self._server = server
        self._offloader = offloader
        self._limit = server.settings.http_max_input_size

    def find_model(self, name: str) -> Model:
        """Return the model with a name, or with a LoRA adapter of that name.

        Raises NOT_FOUND or UNAVAILABLE, and INVALID_ARG for an adapter of several models.
        """
        try:
            return self._server.model(name)
        except ConchError as missing:
            absent = missing.code is Code.NOT_FOUND or isinstance(missing, LoadNeeded)
            parent = self._server.adapter_model(name) if absent else None
            if parent is None:
                raise
            model = self._server.model(parent)
            if name.removeprefix(f"{parent}:") not in model.signature.adapters:  # unloaded with its model
                raise
            return model

    def start(self, exchange: HttpExchange, translation: Translation) -> None:
        """Decode the body of an exchange and start its requests."""
        start_work(exchange, self._run(exchange, translation), cancel_on_disconnect=True)

    async def _run(self, exchange: HttpExchange, translation: Translation) -> None:
        """Decode and start the requests; if something must be loaded first, wait for it and decode again.

        The model stays loaded from the moment its name has been read.
        """
        body, encoding, size = take_body(exchange, self._limit)
        while True:
            again = body if self._server.loads_on_demand or any(map(callable, translation.arguments)) else b""
            with ExitStack() as holds:
                model: Model | None = None

                def signature_of(name: Any) -> ModelSignature:
                    nonlocal model, again
                    model, again = translation.find(name), b""
                    holds.enter_context(model.held())
                    return model.signature

                decoding = self._offloader.run(
                    size, translation.decode, body, encoding, self._limit, signature_of, *translation.arguments
                )
                body = b""
                try:
                    plan, inputs = await decoding
                except LoadNeeded as needed:
                    await needed.wait()
                except EntryNeeded as needed:
                    size += await needed.wait()
                else:
                    assert model is not None
                    translation.respond(exchange, model, plan, inputs).start(model, self._server.tracing)
                    return
            body = again
