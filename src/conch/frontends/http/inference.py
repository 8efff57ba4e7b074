"""Handlers of ``infer``, ``generate`` and ``generate_stream``.

The router calls them on the event loop; a process decodes large bodies. If the client disconnects, its request is
cancelled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator

from conch.core.errors import unsupported
from conch.core.inference import InferRequest
from conch.core.tensors import Buffer
from conch.frontends.forwarding import HeaderForwarding
from conch.frontends.http.background_tasks import start_work, take_body
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.model_requests import observe
from conch.frontends.http.responders import (
    EncodedResponse,
    GenerateResponder,
    GenerateStreamResponder,
    InferResponder,
    TextsResponder,
)
from conch.frontends.offloading import work
from conch.frontends.offloading.messages import resolve_spans
from conch.frontends.offloading.offloader import LARGE_BYTES, Offloader, has_many_strings
from conch.server.core import InferenceServer
from conch.server.execution.caching import MOST_MESSAGE_BYTES
from conch.server.model import Model
from conch.wire import compression
from conch.wire.json.generate import Layout, decode_generate
from conch.wire.json.infer import JsonOutputPlan, parse_header_length
from conch.wire.regions import NO_REGIONS, Regions

#: The parts of a message that determine its response: the body, the size of its JSON, and ``Accept-Encoding``.
_Message = tuple[bytes, bytes | None, bytes | None]


class Inference:
    """The handlers of the three inference endpoints."""

    def __init__(self, server: InferenceServer, offloader: Offloader) -> None:
        self._server = server
        self._offloader = offloader
        self._limit = server.settings.http_max_input_size
        self._forwarding = HeaderForwarding(
            server.settings.http_header_forward_pattern, "--http-header-forward-pattern"
        )
        self._regions = server.regions
        self._tracing = server.tracing

    def admit(self, name: str, version: int) -> Model:
        """Return the model of a request; raises NOT_FOUND or UNAVAILABLE if it cannot serve."""
        return self._server.model(name, version)

    def admit_infer(self, name: str, version: int) -> Model:
        """Return the model of an ``infer`` request; also raises UNSUPPORTED for a decoupled model."""
        model = self._server.model(name, version)
        if model.signature.decoupled:
            raise unsupported("HTTP end point doesn't support models with decoupled transaction policy")
        return model

    def infer(self, exchange: HttpExchange, name: str, version: int) -> None:
        """Handle ``POST …/infer``."""
        model = self.admit_infer(name, version)
        length = exchange.headers.get(b"inference-header-content-length")
        body, encoding, size = take_body(exchange, self._limit)
        message: _Message | None = None
        if model.cached_messages is not None and not encoding and self._may_repeat(body):
            message = bytes(body), length, exchange.headers.get(b"accept-encoding")
            cached = model.cached_response(message)
            if isinstance(cached, EncodedResponse):
                cached.send(exchange)
                return
        responder = InferResponder(exchange, model, self._offloader)
        responder.message = message
        behind = memoryview(b"")
        if length is not None and not encoding and size > LARGE_BYTES:
            # Binary tensors are not decoded, and stay here if their JSON is decoded in a process.
            size = parse_header_length(length, len(body)) or 0
            if size > LARGE_BYTES:
                view = memoryview(body)
                body, behind = view[:size], view[size:]
        regions = self._regions.held_by(exchange.hold) if self._regions else NO_REGIONS
        decoding = self._offloader.run(
            size, work.infer, model.signature, body, len(behind), encoding, length, self._limit, regions
        )
        start_work(
            exchange,
            self._infer(exchange, model, responder, decoding, behind, regions),
            cancel_on_disconnect=True,
            held=model.held,
        )

    async def _infer(
        self,
        exchange: HttpExchange,
        model: Model,
        responder: InferResponder,
        decoding: Awaitable[tuple[list[InferRequest], JsonOutputPlan]],
        behind: memoryview,
        regions: Regions,
    ) -> None:
        [request], responder.plan = await decoding
        request.on_response = responder.on_response
        responder.request = request
        resolve_spans(request, behind, regions)
        if any(map(has_many_strings, request.inputs.values())):
            await self._offloader.count_strings(request)
        if self._forwarding.enabled:
            self._forwarding.add(_as_sent(exchange), request)
        self._send(exchange, model, request)

    def generate(self, exchange: HttpExchange, name: str, version: int) -> None:
        """Handle ``POST …/generate``."""
        model = self._server.model(name, version)
        single = GenerateResponder(exchange, self._offloader, decoupled=model.signature.decoupled)
        texts = model.signature.by_row and not model.signature.max_batch_size
        self._start_generate(exchange, model, single, texts=texts)

    def generate_stream(self, exchange: HttpExchange, name: str, version: int) -> None:
        """Handle ``POST …/generate_stream``."""
        model = self._server.model(name, version)
        responder = GenerateStreamResponder(exchange, self._offloader, decoupled=model.signature.decoupled)
        self._start_generate(exchange, model, responder, texts=False)

    def _start_generate(
        self,
        exchange: HttpExchange,
        model: Model,
        single: GenerateResponder | GenerateStreamResponder,
        *,
        texts: bool,
    ) -> None:
        """Decode a request; ``texts`` allows several texts, which become a request each."""
        compression.check_identity(exchange.headers.get(b"content-encoding", b"identity").decode("latin-1"))
        body, exchange.body = exchange.body, b""
        decoding = self._offloader.run(len(body), decode_generate, model.signature, body, texts, self._limit)
        start_work(
            exchange,
            self._generate(exchange, model, single, decoding),
            cancel_on_disconnect=True,
            held=model.held,
        )

    async def _generate(
        self,
        exchange: HttpExchange,
        model: Model,
        single: GenerateResponder | GenerateStreamResponder,
        decoding: Awaitable[tuple[list[InferRequest], Layout | None]],
    ) -> None:
        requests, layout = await decoding
        if layout is None:
            decoupled = model.signature.decoupled
            TextsResponder(exchange, requests, self._offloader, decoupled=decoupled).start(model, self._tracing)
        else:
            [single.request], single.layout = requests, layout
            single.request.on_response = single.on_response
            self._send(exchange, model, single.request)

    def _may_repeat(self, body: Buffer) -> bool:
        """Whether the body alone determines the request.

        Data in shared memory, which escapes may hide, lies outside the body.
        """
        if len(body) > MOST_MESSAGE_BYTES or self._forwarding.enabled or self._tracing.on:
            return False
        return b"shared_memory" not in bytes(body) and b"\\u" not in bytes(body)

    def _send(self, exchange: HttpExchange, model: Model, request: InferRequest) -> None:
        """Send a request to its model; cancel it if the client disconnects."""
        observe(self._tracing, exchange, request)
        model.infer(request)
        if not request.finished:
            exchange.on_disconnect = request.cancel


def _as_sent(exchange: HttpExchange) -> Iterator[tuple[str, str]]:
    """Return the headers with their names as sent."""
    for name, value in exchange.headers.items():
        yield exchange.names.get(name, name).decode("latin-1"), value.decode("latin-1")
