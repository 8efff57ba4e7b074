"""Handlers of ``infer``, ``generate`` and ``generate_stream``.

The router calls them on the event loop; a helper process decodes large bodies. If the client disconnects, its request
is cancelled.
"""

from __future__ import annotations

from collections.abc import Iterator

from conch.core.errors import unsupported
from conch.core.inference import InferRequest
from conch.core.tensors import Buffer
from conch.frontends.forwarding import HeaderForwarding
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.responders import (
    GenerateResponder,
    GenerateStreamResponder,
    InferResponder,
    SentAnswer,
    TextsResponder,
)
from conch.frontends.http.status import refuse
from conch.frontends.http.tasks import ExchangeTasks, content_encoding, given_up_by_client, small_body
from conch.frontends.http.traced import begin_trace
from conch.frontends.offloading import requests as large
from conch.frontends.offloading.pool import LARGE, Codec
from conch.server.core import InferenceServer
from conch.server.execution.caching import MOST_MESSAGE_BYTES
from conch.server.model import Model
from conch.wire import compression
from conch.wire.json.generate import decode_document, decode_generate, decode_texts, read_document
from conch.wire.json.infer import decode_infer, parse_header_length
from conch.wire.regions import NO_REGIONS

_Generate = GenerateResponder | GenerateStreamResponder


class Inference:
    """The handlers of the three inference endpoints."""

    def __init__(self, server: InferenceServer, codec: Codec) -> None:
        self._server = server
        self._codec = codec
        self._limit = server.settings.http_max_input_size
        self._forwarding = HeaderForwarding(
            server.settings.http_header_forward_pattern, "--http-header-forward-pattern"
        )
        self._regions = server.regions
        self._tasks = ExchangeTasks(refuse)
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
        body = small_body(exchange, self._limit)
        if body is None:
            self._infer_large(exchange, model, length)
        elif model.cached_messages is None or not self._may_repeat(body):
            self._send(exchange, model, self._decode_infer(exchange, model, body, length))
        else:
            self._infer_again(exchange, model, bytes(body), length)

    def generate(self, exchange: HttpExchange, name: str, version: int) -> None:
        """Handle ``POST …/generate``."""
        model = self._server.model(name, version)
        if model.signature.by_row and not model.signature.max_batch_size:
            self._generate_texts(exchange, model)
        else:
            responder = GenerateResponder(exchange, self._codec, decoupled=model.signature.decoupled)
            self._generate(exchange, model, responder)

    def generate_stream(self, exchange: HttpExchange, name: str, version: int) -> None:
        """Handle ``POST …/generate_stream``."""
        model = self._server.model(name, version)
        responder = GenerateStreamResponder(exchange, self._codec, decoupled=model.signature.decoupled)
        self._generate(exchange, model, responder)

    def _infer_again(self, exchange: HttpExchange, model: Model, body: bytes, length: bytes | None) -> None:
        """Send the stored response to an identical body if the response cache still has it."""
        message = body, length, exchange.headers.get(b"accept-encoding")
        answer = model.cached_response(message)
        if isinstance(answer, SentAnswer):
            answer.send(exchange)
        else:
            self._send(exchange, model, self._decode_infer(exchange, model, body, length, message))

    def _may_repeat(self, body: Buffer) -> bool:
        """Whether the body alone determines the request.

        Data in shared memory, which escapes may hide, lies outside the body.
        """
        if len(body) > MOST_MESSAGE_BYTES or self._forwarding.enabled or self._tracing.on:
            return False
        return b"shared_memory" not in bytes(body) and b"\\u" not in bytes(body)

    def _infer_large(self, exchange: HttpExchange, model: Model, length: bytes | None) -> None:
        """Decode a mostly binary body here; leave a slow one to the codec."""
        body = exchange.body
        encoding = content_encoding(exchange)
        if length is None or not compression.is_identity(encoding):
            self._tasks.start(exchange, self._have_decoded(exchange, model, encoding, length))
            return
        size = parse_header_length(length, len(body)) or 0
        if size > LARGE:
            self._tasks.start(exchange, self._have_header_decoded(exchange, model, size))
            return
        request = self._decode_infer(exchange, model, body, length)
        if any(
            tensor.datatype == "BYTES" and large.has_many_strings(tensor.data) for tensor in request.inputs.values()
        ):
            self._tasks.start(exchange, self._have_decoded(exchange, model, "", length))
        else:
            self._send(exchange, model, request)

    async def _have_decoded(self, exchange: HttpExchange, model: Model, encoding: str, length: bytes | None) -> None:
        body, exchange.body = exchange.body, b""
        responder = InferResponder(exchange, model, self._codec)
        with model.held():
            with given_up_by_client(exchange):
                decoding = large.decode_infer(
                    self._codec, body, model.signature, responder.on_response, encoding=encoding, header_length=length,
                    limit=self._limit, regions=self._regions.held_by(exchange.hold),
                )  # fmt: skip
                del body
                request, responder.plan = await decoding
            self._finish_infer(exchange, model, responder, request)

    async def _have_header_decoded(self, exchange: HttpExchange, model: Model, size: int) -> None:
        responder = InferResponder(exchange, model, self._codec)
        with model.held():
            with given_up_by_client(exchange):
                request, responder.plan = await large.decode_json(
                    self._codec, exchange.body, size, model.signature, responder.on_response, limit=self._limit,
                    regions=self._regions.held_by(exchange.hold),
                )  # fmt: skip
            self._finish_infer(exchange, model, responder, request)

    def _finish_infer(
        self, exchange: HttpExchange, model: Model, responder: InferResponder, request: InferRequest
    ) -> None:
        responder.request = request
        self._forward_headers(exchange, request)
        self._send(exchange, model, request)

    def _decode_infer(
        self,
        exchange: HttpExchange,
        model: Model,
        body: Buffer,
        length: bytes | None,
        message: tuple[bytes, bytes | None, bytes | None] | None = None,
    ) -> InferRequest:
        responder = InferResponder(exchange, model, self._codec)
        responder.message = message
        request, responder.plan = decode_infer(
            body,
            parse_header_length(length, len(body)),
            model.signature,
            responder.on_response,
            max_input_size=self._limit,
            regions=self._regions.held_by(exchange.hold) if self._regions else NO_REGIONS,
        )
        responder.request = request
        self._forward_headers(exchange, request)
        return request

    def _forward_headers(self, exchange: HttpExchange, request: InferRequest) -> None:
        if self._forwarding.enabled:
            self._forwarding.add(_as_sent(exchange), request)

    def _generate(self, exchange: HttpExchange, model: Model, responder: _Generate) -> None:
        compression.check_identity(exchange.headers.get(b"content-encoding", b"identity").decode("latin-1"))
        if len(exchange.body) > LARGE:
            self._tasks.start(exchange, self._have_generate_decoded(exchange, model, responder))
            return
        request, responder.layout = decode_generate(
            exchange.body, model.signature, responder.on_response, max_input_size=self._limit
        )
        responder.request = request
        self._send(exchange, model, request)

    async def _have_generate_decoded(self, exchange: HttpExchange, model: Model, responder: _Generate) -> None:
        body, exchange.body = exchange.body, b""
        with model.held():
            with given_up_by_client(exchange):
                decoding = large.decode_generate(
                    self._codec, body, model.signature, lambda _: responder.on_response, texts=False, limit=self._limit
                )
                del body
                [request], layout = await decoding
            assert layout is not None
            responder.request, responder.layout = request, layout
            self._send(exchange, model, request)

    def _generate_texts(self, exchange: HttpExchange, model: Model) -> None:
        compression.check_identity(exchange.headers.get(b"content-encoding", b"identity").decode("latin-1"))
        decoupled = model.signature.decoupled
        single = GenerateResponder(exchange, self._codec, decoupled=decoupled)
        several = TextsResponder(exchange, self._codec, decoupled=decoupled)
        if len(exchange.body) > LARGE:
            self._tasks.start(exchange, self._have_texts_decoded(exchange, model, single, several))
            return
        document = read_document(exchange.body, model.signature, self._limit)
        requests = decode_texts(document, model.signature, several.of, self._limit)
        if requests is not None:
            several.requests = requests
        else:
            single.request, single.layout = decode_document(
                document, model.signature, single.on_response, max_input_size=self._limit
            )
        self._send_texts(exchange, model, single, several)

    async def _have_texts_decoded(
        self, exchange: HttpExchange, model: Model, single: GenerateResponder, several: TextsResponder
    ) -> None:
        body, exchange.body = exchange.body, b""
        with model.held():
            with given_up_by_client(exchange):
                decoding = large.decode_generate(
                    self._codec,
                    body,
                    model.signature,
                    lambda index: single.on_response if index is None else several.of(index),
                    texts=True,
                    limit=self._limit,
                )
                del body
                requests, layout = await decoding
            if layout is None:
                several.requests = requests
            else:
                [single.request], single.layout = requests, layout
            self._send_texts(exchange, model, single, several)

    def _send(self, exchange: HttpExchange, model: Model, request: InferRequest) -> None:
        """Send a request to its model; cancel it if the client disconnects."""
        if self._tracing.on:
            begin_trace(self._tracing, exchange, request)
        model.infer(request)
        if not request.finished:
            exchange.on_disconnect = request.cancel

    def _send_texts(
        self, exchange: HttpExchange, model: Model, single: GenerateResponder, several: TextsResponder
    ) -> None:
        if several.requests:
            several.start(model, self._tracing)
        else:
            self._send(exchange, model, single.request)


def _as_sent(exchange: HttpExchange) -> Iterator[tuple[str, str]]:
    """Return the headers with their names as sent."""
    for name, value in exchange.headers.items():
        yield exchange.names.get(name, name).decode("latin-1"), value.decode("latin-1")
