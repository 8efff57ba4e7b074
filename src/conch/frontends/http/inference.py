"""``infer``, ``generate`` and ``generate_stream``: from an exchange to a request, and from responses to an answer.

Runs on the event loop.  A client that goes away cancels its request.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from conch.errors import ConchError, internal, unsupported
from conch.frontends.http.exchange import Exchange
from conch.frontends.http.status import JSON, STATUS, refuse
from conch.inference import InferRequest, InferResponse
from conch.server.core import Server
from conch.server.model import Model
from conch.wire import compression
from conch.wire.json.control import error_body
from conch.wire.json.generate import NOT_ONE_RESPONSE, decode_generate, encode_generate, server_sent_event
from conch.wire.json.infer import OutputPlan, decode_infer, encode_infer, parse_header_length

LOG = logging.getLogger("conch")

BINARY: Final = (b"content-type", b"application/octet-stream")
EVENTS: Final = (b"content-type", b"text/event-stream; charset=utf-8")
#: A stream whose client leaves this much unread (bytes) is given up.
UNREAD_LIMIT: Final = 64 << 20


class Inference:
    """The handlers of the three inference endpoints."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limit = server.settings.http_max_input_size
        pattern = server.settings.http_header_forward_pattern
        self._forwarded = re.compile(pattern.encode(), re.IGNORECASE) if pattern else None

    def infer(self, exchange: Exchange, name: str, version: int) -> None:
        """``POST …/infer``."""
        headers = exchange.headers
        try:
            model = self._server.model(name, version)
            if model.signature.decoupled:
                raise unsupported("HTTP end point doesn't support models with decoupled transaction policy")
            body = exchange.body
            encoding = headers.get(b"content-encoding")
            if encoding is not None:
                body = compression.decompress(body, encoding.decode("latin-1"), self._limit)
            header_length = parse_header_length(headers.get(b"inference-header-content-length"), len(body))
            answer = _Infer(exchange, model)
            request, answer.plan = decode_infer(
                body, header_length, model.signature, answer, max_input_size=self._limit
            )
            if self._forwarded is not None:
                self._forward_headers(exchange, request)
            answer.request = request
            model.infer(request)
        except ConchError as error:
            if error.message == "Unsupported compression type":
                refuse(exchange, error, (b"accept-encoding", compression.ACCEPTED.encode()))
            else:
                refuse(exchange, error)
            return
        if not request.finished:
            exchange.on_disconnect = request.cancel

    def generate(self, exchange: Exchange, name: str, version: int) -> None:
        """``POST …/generate``."""
        self._generate(exchange, name, version, _Generate(exchange))

    def generate_stream(self, exchange: Exchange, name: str, version: int) -> None:
        """``POST …/generate_stream``."""
        self._generate(exchange, name, version, _GenerateStream(exchange))

    def _generate(self, exchange: Exchange, name: str, version: int, answer: _Generate | _GenerateStream) -> None:
        try:
            model = self._server.model(name, version)
            compression.check_identity(exchange.headers.get(b"content-encoding", b"identity").decode("latin-1"))
            answer.request = decode_generate(exchange.body, model.signature, answer, max_input_size=self._limit)
            model.infer(answer.request)
        except ConchError as error:
            refuse(exchange, error)
            return
        if not answer.request.finished:
            exchange.on_disconnect = answer.request.cancel

    def _forward_headers(self, exchange: Exchange, request: InferRequest) -> None:
        assert self._forwarded is not None
        forwarded = {
            key.decode("latin-1"): value.decode("latin-1")
            for key, value in exchange.headers.items()
            if self._forwarded.search(key)
        }
        request.parameters = {**request.parameters, **forwarded}


class _Infer:
    """Answers an ``infer`` exchange when its request ends."""

    __slots__ = ("_exchange", "_kept", "_model", "plan", "request")

    plan: OutputPlan
    request: InferRequest

    def __init__(self, exchange: Exchange, model: Model) -> None:
        self._exchange = exchange
        self._model = model
        self._kept: list[InferResponse] | None = None

    def __call__(self, response: InferResponse) -> None:
        if not response.final or self._kept is not None:
            self._collect(response)
            return
        if response.error is not None:
            refuse(self._exchange, response.error)
            return
        exchange = self._exchange
        try:
            header, blobs = encode_infer(self.request, response, self.plan, self._model.labels)
        except ConchError as error:
            refuse(exchange, error)
            return
        headers = [BINARY, (b"inference-header-content-length", b"%d" % len(header))] if blobs else [JSON]
        accepted = exchange.headers.get(b"accept-encoding")
        encoding = compression.negotiate(accepted.decode("latin-1")) if accepted is not None else "identity"
        if encoding != "identity":
            headers.append((b"content-encoding", encoding.encode()))
            exchange.respond(200, headers, compression.compress([header, *blobs], encoding))
        else:
            exchange.respond(200, headers, header, *blobs)

    def _collect(self, response: InferResponse) -> None:
        """A response sender spoke: there must be one response in all, and the end may come after it."""
        kept = self._kept = self._kept or []
        if not response.empty:
            kept.append(response)
        if not response.final:
            return
        self._kept = None
        if len(kept) == 1:
            kept[0].final = True
            self(kept[0])
        else:
            refuse(self._exchange, internal(f"expected a single response, got {len(kept)}"))


class _Generate:
    """Answers a ``generate`` exchange: one response, as JSON."""

    __slots__ = ("_count", "_exchange", "_first", "request")

    request: InferRequest

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._first: InferResponse | None = None
        self._count = 0

    def __call__(self, response: InferResponse) -> None:
        if not response.empty:
            self._count += 1
            self._first = self._first or response
        if not response.final:
            return
        first = self._first
        if first is not None and first.error is not None:
            refuse(self._exchange, first.error)
        elif first is None or self._count > 1:
            self._exchange.respond(200, [JSON], error_body(NOT_ONE_RESPONSE))
        else:
            try:
                self._exchange.respond(200, [JSON], encode_generate(self.request, first))
            except ConchError as error:
                refuse(self._exchange, error)


class _GenerateStream:
    """Answers a ``generate_stream`` exchange: each response is an event; the first one decides the status."""

    __slots__ = ("_exchange", "request")

    request: InferRequest

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __call__(self, response: InferResponse) -> None:
        exchange = self._exchange
        status, event = 200, b""
        if response.error is not None:
            status, event = STATUS[response.error.code], error_body(response.error.message)
        elif not response.empty:
            try:
                event = encode_generate(self.request, response)
            except ConchError as error:
                status, event = STATUS[error.code], error_body(error.message)
        if not exchange.started and (event or response.final):
            exchange.start(status, [EVENTS])
        if event:
            exchange.write(server_sent_event(event))
        if response.final:
            exchange.finish()
        elif exchange.unsent > UNREAD_LIMIT:
            LOG.warning("the client of a stream of '%s' does not read; giving its request up", self.request.model_name)
            exchange.abort()
