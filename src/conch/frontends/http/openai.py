"""The OpenAI API: the handlers of models, chats, completions and embeddings.

Called by the router; runs on the event loop, but for large bodies, which another process reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import time

from conch.errors import Code, ConchError
from conch.frontends.codec.pool import Codec
from conch.frontends.codec.requests import decode_openai
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.openai_responders import EmbeddingResponder, GenerationResponder, OpenAiResponder
from conch.frontends.http.openai_status import refuse
from conch.frontends.http.tasks import ExchangeTasks, content_encoding, given_up_by_client, small_body
from conch.inference import ModelSignature
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.server.on_demand import LoadNeeded
from conch.tensors import WireTensor
from conch.wire.openai.answering import AnswerPlan
from conch.wire.openai.embeddings import EmbeddingPlan
from conch.wire.openai.endpoints import ENDPOINTS
from conch.wire.openai.errors import ApiError
from conch.wire.openai.models import list_body, model_body, usable
from conch.wire.openai.reading import read_body


class OpenAi:
    """The handlers; each answers its exchange or raises :class:`ConchError`."""

    def __init__(self, server: InferenceServer, codec: Codec) -> None:
        self._server = server
        self._codec = codec
        self._limit = server.settings.http_max_input_size
        self._created = int(time())
        self._tasks = ExchangeTasks(refuse)

    def models(self, exchange: HttpExchange) -> None:
        """``GET /v1/models``: lists the ready models that one of the endpoints can use."""
        names = self._server.ready_models()
        exchange.respond(200, [JSON], list_body(filter(self._is_usable, names), self._created))

    def model(self, exchange: HttpExchange, name: str) -> None:
        """``GET /v1/models/{name}``: describes one of them."""
        if not self._is_usable(name):
            raise _unknown(f"The model '{name}' does not exist")
        exchange.respond(200, [JSON], model_body(name, self._created))

    def chat(self, exchange: HttpExchange) -> None:
        """``POST /v1/chat/completions``."""
        self._start(exchange, "chat")

    def completion(self, exchange: HttpExchange) -> None:
        """``POST /v1/completions``."""
        self._start(exchange, "completion")

    def embedding(self, exchange: HttpExchange) -> None:
        """``POST /v1/embeddings``."""
        self._start(exchange, "embedding")

    def _is_usable(self, name: str) -> bool:
        """Whether an endpoint can use the model; of one that has never been loaded, that is not known."""
        if not self._server.model_ready(name):
            return False
        signature = self._server.signature(name)
        return signature is None or usable(signature)

    def _start(self, exchange: HttpExchange, endpoint: str) -> None:
        body = small_body(exchange, self._limit)
        if body is None:
            self._tasks.start(exchange, self._start_large(exchange, endpoint))
            return
        require, read = ENDPOINTS[endpoint]
        fields = read_body(body)
        model = self._model(fields.required_text("model"))
        require(model.signature)
        request = read(fields)
        self._responder(exchange, model, request.plan, request.inputs(model.signature)).start(
            model, self._server.tracing
        )

    async def _start_large(self, exchange: HttpExchange, endpoint: str) -> None:
        """Have a request decoded, and again when its model has been loaded, if that turns out to be needed."""
        while True:
            try:
                await self._decode_large(exchange, endpoint)
                return
            except LoadNeeded as needed:
                with given_up_by_client(exchange), _in_its_words():
                    await needed.wait()

    async def _decode_large(self, exchange: HttpExchange, endpoint: str) -> None:
        """Have a request decoded; its model stays loaded meanwhile, once its name has been read."""
        body = exchange.body
        if not self._server.loads_on_demand:
            exchange.body = b""
        with ExitStack() as stack:
            model: Model

            def signature_of(name: str) -> ModelSignature:
                nonlocal model
                model = self._model(name)
                stack.enter_context(model.held())
                exchange.body = b""
                return model.signature

            with given_up_by_client(exchange):
                decoding = decode_openai(
                    self._codec, body, endpoint, signature_of, encoding=content_encoding(exchange), limit=self._limit
                )
                del body
                plan, inputs = await decoding
            self._responder(exchange, model, plan, inputs).start(model, self._server.tracing)

    def _responder(
        self,
        exchange: HttpExchange,
        model: Model,
        plan: AnswerPlan | EmbeddingPlan,
        inputs: Sequence[dict[str, WireTensor]],
    ) -> OpenAiResponder:
        if isinstance(plan, EmbeddingPlan):
            return EmbeddingResponder(exchange, model, plan, inputs, self._codec)
        return GenerationResponder(exchange, model, plan, inputs)

    def _model(self, name: str) -> Model:
        with _in_its_words():
            return self._server.model(name)


@contextmanager
def _in_its_words() -> Iterator[None]:
    """Say of a model that is not there what OpenAI says."""
    try:
        yield
    except ConchError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        raise _unknown(error.public) from None


def _unknown(message: str) -> ApiError:
    return ApiError(message, "model", code=Code.NOT_FOUND, reason="model_not_found")
