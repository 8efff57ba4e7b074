"""``infer``, ``generate`` and ``generate_stream``: from an exchange to a request.

Called by the router; runs on the event loop, but for large bodies, which are decoded in a thread.  A client that hangs
up cancels its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from conch.errors import ConchError, invalid, unsupported
from conch.frontends.forwarding import HeaderForwarding
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.responders import GenerateResponder, GenerateStreamResponder, InferResponder, TextsResponder
from conch.frontends.http.status import refuse
from conch.frontends.http.tasks import ExchangeTasks, is_large
from conch.inference import InferRequest
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.wire import compression
from conch.wire.json.generate import decode_document, decode_generate, read_document
from conch.wire.json.generate_texts import split_texts
from conch.wire.json.infer import decode_infer, parse_header_length

_Generate = GenerateResponder | GenerateStreamResponder


class Inference:
    """The handlers of the three inference endpoints."""

    def __init__(self, server: InferenceServer) -> None:
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
        if is_large(exchange, binary=length is not None):
            decode = partial(self._decode_infer, exchange, model, length)
            self._tasks.start(exchange, _decode_and_send(exchange, model, decode))
        else:
            _send(exchange, model, self._decode_infer(exchange, model, length))

    def generate(self, exchange: HttpExchange, name: str, version: int) -> None:
        """``POST …/generate``."""
        model = self._server.model(name, version)
        if model.signature.by_row and not model.signature.max_batch_size:
            self._generate_texts(exchange, model)
        else:
            self._generate(exchange, model, GenerateResponder(exchange))

    def generate_stream(self, exchange: HttpExchange, name: str, version: int) -> None:
        """``POST …/generate_stream``."""
        self._generate(exchange, self._server.model(name, version), GenerateStreamResponder(exchange))

    def _generate(self, exchange: HttpExchange, model: Model, responder: _Generate) -> None:
        compression.check_identity(exchange.headers.get(b"content-encoding", b"identity").decode("latin-1"))
        if is_large(exchange):
            decode = partial(self._decode_generate, exchange, model, responder)
            self._tasks.start(exchange, _decode_and_send(exchange, model, decode))
        else:
            _send(exchange, model, self._decode_generate(exchange, model, responder))

    def _generate_texts(self, exchange: HttpExchange, model: Model) -> None:
        compression.check_identity(exchange.headers.get(b"content-encoding", b"identity").decode("latin-1"))
        if is_large(exchange):
            self._tasks.start(exchange, self._decode_and_send_texts(exchange, model))
        else:
            _send_texts(exchange, model, self._decode_texts(exchange, model))

    async def _decode_and_send_texts(self, exchange: HttpExchange, model: Model) -> None:
        with model.held():
            requests = await asyncio.to_thread(self._decode_texts, exchange, model)
            if not exchange.gone:
                _send_texts(exchange, model, requests)

    def _decode_texts(self, exchange: HttpExchange, model: Model) -> list[InferRequest]:
        """A request for each text of a body, and its only request where it has no list of them."""
        signature, limit = model.signature, self._limit
        document = read_document(exchange.body, limit)
        documents = split_texts(document, signature)
        if documents is None:
            single = GenerateResponder(exchange)
            single.request, single.layout = decode_document(
                document, signature, single.on_response, max_input_size=limit
            )
            return [single.request]
        responder = TextsResponder(exchange)
        size = 0
        for index, one in enumerate(documents):
            request, _ = decode_document(one, signature, responder.of(index), max_input_size=limit)
            responder.requests.append(request)
            size += sum(len(tensor.data) for tensor in request.inputs.values())
            if size > limit:
                raise invalid(
                    f"the requests of {index + 1} texts have {size} bytes, which exceeds the maximum allowed input size"
                    f" of {limit} bytes. Use --http-max-input-size to increase the limit."
                )
        return responder.requests

    def _decode_infer(self, exchange: HttpExchange, model: Model, length: bytes | None) -> InferRequest:
        body = exchange.body
        encoding = exchange.headers.get(b"content-encoding")
        if encoding is not None:
            body = compression.decompress(body, encoding.decode("latin-1"), self._limit)
        responder = InferResponder(exchange, model)
        request, responder.plan = decode_infer(
            body,
            parse_header_length(length, len(body)),
            model.signature,
            responder.on_response,
            max_input_size=self._limit,
        )
        responder.request = request
        if self._forwarding.enabled:
            self._forwarding.add(_text(exchange.headers), request)
        return request

    def _decode_generate(self, exchange: HttpExchange, model: Model, responder: _Generate) -> InferRequest:
        request, responder.layout = decode_generate(
            exchange.body, model.signature, responder.on_response, max_input_size=self._limit
        )
        responder.request = request
        return request


async def _decode_and_send(exchange: HttpExchange, model: Model, decode: Callable[[], InferRequest]) -> None:
    """Decode a request in a thread, by the signature of ``model``, which stays loaded meanwhile, and send it there."""
    with model.held():
        request = await asyncio.to_thread(decode)
        if not exchange.gone:
            _send(exchange, model, request)


def _send(exchange: HttpExchange, model: Model, request: InferRequest) -> None:
    """Send a request to its model; the client's hanging up cancels it."""
    model.infer(request)
    if not request.finished:
        exchange.on_disconnect = request.cancel


def _send_texts(exchange: HttpExchange, model: Model, requests: Sequence[InferRequest]) -> None:
    """Send requests that are answered together; the client's hanging up, and one that is refused, cancels them all."""

    def cancel() -> None:
        for request in requests:
            request.cancel()

    try:
        for request in requests:
            model.infer(request)
    except ConchError as error:
        refuse(exchange, error)  # before those that are cancelled respond
        cancel()
    if not exchange.gone:
        exchange.on_disconnect = cancel


def _text(headers: dict[bytes, bytes]) -> Iterator[tuple[str, str]]:
    for name, value in headers.items():
        yield name.decode("latin-1"), value.decode("latin-1")
