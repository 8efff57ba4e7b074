"""Handlers of OpenAI's transcriptions and translations of recordings.

``wire.transcriptions`` translates forms and responses; the handlers find the model and send its responses. The router
calls them on the event loop; a process decodes large forms and encodes large responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest, ignore
from conch.core.tensors import WireTensor
from conch.frontends.http.dialects import OPENAI
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.model_requests import JoinedResponder, ModelRequests, Translation
from conch.frontends.http.responders import send_events
from conch.frontends.offloading import work
from conch.frontends.offloading.offloader import Offloader
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.server.models.on_demand import LoadNeeded
from conch.wire.openai.models import transcribes
from conch.wire.openai.reading import ApiError, error_body
from conch.wire.openai.response import event
from conch.wire.transcriptions import CONTENT_TYPES, TranscriptionPlan, named_member, text_delta


class TranscriptionResponder(JoinedResponder):
    """Responds with a transcription, or streams its text as the model reports it."""

    def __init__(
        self,
        exchange: HttpExchange,
        model: Model,
        plan: TranscriptionPlan,
        inputs: Sequence[dict[str, WireTensor]],
        *,
        offloader: Offloader,
    ) -> None:
        super().__init__(exchange, [InferRequest(model.name, tensors, ignore) for tensors in inputs], offloader)
        self._plan = plan
        self._sent = ""
        if plan.stream:
            self._requests[0].on_text = self._send_text

    def _send_text(self, text: str) -> None:
        if not self._ended:
            self._sent, delta = text_delta(self._sent, text)
            send_events(self._exchange, delta, self._model)

    def _fail(self, error: ConchError) -> None:
        error = named_member(error)
        if not self._exchange.started:
            super()._fail(error)
            return
        self.cancel()
        send_events(self._exchange, event(error_body(OPENAI.status(error), error)), self._model)
        self._exchange.finish()

    async def _encode(self) -> None:
        try:
            body = await self._offloader.run(self._size, work.transcription_body, self._plan, self._parts, self._sent)
        except ConchError as error:
            self._fail(error)
            return
        if self._plan.stream:
            send_events(self._exchange, bytes(body), self._model)
            self._exchange.finish()
        else:
            self._exchange.respond(200, [(b"Content-Type", CONTENT_TYPES[self._plan.format])], body)


class Transcriptions:
    """The handlers; each responds to its exchange or raises :class:`ConchError`."""

    def __init__(self, server: InferenceServer, offloader: Offloader) -> None:
        self._server = server
        self._requests = ModelRequests(server, offloader)
        self._responder = partial(TranscriptionResponder, offloader=offloader)

    def handler(self, task: str) -> Callable[[HttpExchange], None]:
        """Return the handler of a task, ``transcribe`` or ``translate``."""
        return partial(self._start, task)

    def _start(self, task: str, exchange: HttpExchange) -> None:
        content_type = exchange.headers.get(b"content-type", b"").decode("latin-1")
        translation = Translation(work.transcription, (content_type, task), self._find, self._responder)
        self._requests.start(exchange, translation)

    def _find(self, name: str) -> Model:
        """Return the model of a request; the errors list the models that transcribe."""
        try:
            model = self._requests.find_model(name)
        except LoadNeeded:
            raise
        except ConchError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            message = f"{error.message}; {self._choice()}"
            raise ApiError(message, "model", code=Code.NOT_FOUND, reason="model_not_found") from None
        if not transcribes(model.signature):
            raise ApiError(f"model '{model.name}' does not transcribe recordings; {self._choice()}", "model")
        return model

    def _choice(self) -> str:
        """Return which ready models transcribe recordings, for errors."""
        signatures = self._server.signatures().items()
        names = [f"'{name}'" for name, signature in signatures if signature is not None and transcribes(signature)]
        return f"models that do: {', '.join(names[:10])}" if names else "no ready model does"
