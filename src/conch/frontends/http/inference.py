"""``infer``, ``generate`` and ``generate_stream``: from an exchange to a request, and from responses to an answer.

Runs on the event loop.  A client that goes away cancels its request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from conch.errors import ConchError, internal, unsupported
from conch.frontends.forwarding import HeaderForwarding
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.status import STATUS, refuse
from conch.frontends.http.tasks import ExchangeTasks
from conch.inference import InferRequest, InferResponse
from conch.server.core import Server
from conch.server.model import Model
from conch.wire import compression
from conch.wire.json.control import error_body
from conch.wire.json.generate import NOT_ONE_RESPONSE, decode_generate, encode_generate, server_sent_event
from conch.wire.json.infer import JsonOutputPlan, decode_infer, encode_infer, parse_header_length

LOG = logging.getLogger("conch")

BINARY: Final = (b"Content-Type", b"application/octet-stream")
EVENTS: Final = (b"Content-Type", b"text/event-stream; charset=utf-8")
#: A stream whose client leaves this much unread (bytes) is given up.
UNREAD_LIMIT: Final = 64 << 20


class Inference:
    """The handlers of the three inference endpoints."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limit = server.settings.http_max_input_size
        self._forwarding = HeaderForwarding(
            server.settings.http_header_forward_pattern, "--http-header-forward-pattern"
        )
        self._tasks = ExchangeTasks(refuse)

    def infer(self, exchange: HttpExchange, name: str, version: int) -> None:
        """``POST …/infer``."""
        model = self._server.model(name, version)
        if model.signature.decoupled:
            raise unsupported("HTTP end point doesn't support models with decoupled transaction policy")
        length = exchange.headers.get(b"inference-header-content-length")
        json_size = len(exchange.body) if length is None else 0
        self._start(exchange, model, partial(self._decode_infer, exchange, model, length), json_size)

    def generate(self, exchange: HttpExchange, name: str, version: int) -> None:
        """``POST …/generate``."""
        self._generate(exchange, name, version, _Generate(exchange))

    def generate_stream(self, exchange: HttpExchange, name: str, version: int) -> None:
        """``POST …/generate_stream``."""
        self._generate(exchange, name, version, _GenerateStream(exchange))

    def _generate(self, exchange: HttpExchange, name: str, version: int, answer: _Generate | _GenerateStream) -> None:
        model = self._server.model(name, version)
        compression.check_identity(exchange.headers.get(b"content-encoding", b"identity").decode("latin-1"))
        self._start(exchange, model, partial(self._decode_generate, exchange, model, answer), len(exchange.body))

    def _start(self, exchange: HttpExchange, model: Model, decode: Callable[[], InferRequest], json_size: int) -> None:
        self._tasks.decode(exchange, json_size, decode, partial(_send, exchange, model), model)

    def _decode_infer(self, exchange: HttpExchange, model: Model, length: bytes | None) -> InferRequest:
        body = exchange.body
        encoding = exchange.headers.get(b"content-encoding")
        if encoding is not None:
            body = compression.decompress(body, encoding.decode("latin-1"), self._limit)
        answer = _Infer(exchange, model)
        request, answer.plan = decode_infer(
            body, parse_header_length(length, len(body)), model.signature, answer, max_input_size=self._limit
        )
        answer.request = request
        if self._forwarding.enabled:
            self._forwarding.add(_text(exchange.headers), request)
        return request

    def _decode_generate(
        self, exchange: HttpExchange, model: Model, answer: _Generate | _GenerateStream
    ) -> InferRequest:
        request = decode_generate(exchange.body, model.signature, answer, max_input_size=self._limit)
        answer.request = request
        return request


def _send(exchange: HttpExchange, model: Model, request: InferRequest) -> None:
    """Send a request to its model; the client's hanging up cancels it."""
    model.infer(request)
    if not request.finished:
        exchange.on_disconnect = request.cancel


def _text(headers: dict[bytes, bytes]) -> Iterator[tuple[str, str]]:
    for name, value in headers.items():
        yield name.decode("latin-1"), value.decode("latin-1")


class _Answer:
    """Turns the responses of a request into the answer of its exchange; whatever happens, the client hears of it."""

    __slots__ = ("_exchange", "request")

    request: InferRequest

    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange

    def __call__(self, response: InferResponse) -> None:
        exchange = self._exchange
        try:
            self._take(response)
        except ConchError as error:
            refuse(exchange, error)
        except Exception:
            LOG.exception("a response of '%s' could not be written", self.request.model_name)
            if exchange.started:
                exchange.abort()
            else:
                refuse(exchange, internal("the response could not be written"))

    def _take(self, response: InferResponse) -> None:
        raise NotImplementedError


class _Infer(_Answer):
    """``infer``: one response, which a response sender may end separately."""

    __slots__ = ("_kept", "_model", "plan")

    plan: JsonOutputPlan

    def __init__(self, exchange: HttpExchange, model: Model) -> None:
        super().__init__(exchange)
        self._model = model
        self._kept: list[InferResponse] | None = None

    def _take(self, response: InferResponse) -> None:
        if not response.final or self._kept is not None:
            self._collect(response)
            return
        if response.error is not None:
            raise response.error
        exchange = self._exchange
        header, blobs = encode_infer(self.request, response, self.plan, self._model.labels)
        headers = [BINARY, (b"Inference-Header-Content-Length", b"%d" % len(header))] if blobs else [JSON]
        accepted = exchange.headers.get(b"accept-encoding")
        encoding = compression.negotiate(accepted.decode("latin-1")) if accepted is not None else "identity"
        if encoding != "identity":
            headers.append((b"Content-Encoding", encoding.encode()))
            exchange.respond(200, headers, compression.compress([header, *blobs], encoding))
        else:
            exchange.respond(200, headers, header, *blobs)

    def _collect(self, response: InferResponse) -> None:
        """There must be one response in all; the end may come after it."""
        kept = self._kept = self._kept or []
        if not response.empty:
            kept.append(response)
        if not response.final:
            return
        if len(kept) != 1:
            raise internal(f"expected a single response, got {len(kept)}")
        self._kept = None
        kept[0].final = True
        self._take(kept[0])


class _Generate(_Answer):
    """``generate``: one response, as JSON."""

    __slots__ = ("_count", "_first")

    def __init__(self, exchange: HttpExchange) -> None:
        super().__init__(exchange)
        self._first: InferResponse | None = None
        self._count = 0

    def _take(self, response: InferResponse) -> None:
        if not response.empty:
            self._count += 1
            self._first = self._first or response
        if not response.final:
            return
        first = self._first
        if first is not None and first.error is not None:
            raise first.error
        if first is None or self._count > 1:
            self._exchange.respond(200, [JSON], error_body(NOT_ONE_RESPONSE))
        else:
            self._exchange.respond(200, [JSON], encode_generate(self.request, first))


class _GenerateStream(_Answer):
    """``generate_stream``: each response is an event; the first one decides the status."""

    __slots__ = ()

    def _take(self, response: InferResponse) -> None:
        exchange = self._exchange
        status, event = self._event(response)
        if not exchange.started and (event or response.final):
            exchange.start(status, [EVENTS])
        if event:
            exchange.write(server_sent_event(event))
        if response.final:
            exchange.finish()
        elif exchange.unsent > UNREAD_LIMIT:
            LOG.warning("the client of a stream of '%s' does not read; giving its request up", self.request.model_name)
            exchange.abort()

    def _event(self, response: InferResponse) -> tuple[int, bytes]:
        if response.empty:
            return 200, b""
        try:
            if response.error is not None:
                raise response.error
            return 200, encode_generate(self.request, response)
        except ConchError as error:
            return STATUS[error.code], error_body(error.message)
