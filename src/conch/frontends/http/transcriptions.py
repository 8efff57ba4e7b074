"""Handlers of OpenAI's transcriptions and translations of recordings.

``wire.transcriptions`` translates forms and responses; the handlers find the model and send its responses. The router
calls them on the event loop; a process decodes large forms and encodes large responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from conch.core.errors import Code, ConchError
from conch.core.inference import InferResponse
from conch.core.tensors import WireTensor
from conch.frontends.http.background_tasks import BackgroundTasks
from conch.frontends.http.dialects import refuse
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.model_requests import ModelRequests, RequestsResponder, Translation
from conch.frontends.http.responders import EVENTS
from conch.frontends.offloading import work
from conch.frontends.offloading.offloader import Offloader
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.server.models.on_demand import LoadNeeded
from conch.wire.openai.models import transcribes
from conch.wire.openai.reading import ApiError
from conch.wire.transcriptions import CONTENT_TYPES, TranscriptionPlan, named_member

#: Encodes responses.
_ENCODING: Final = BackgroundTasks(refuse)


class TranscriptionResponder(RequestsResponder):
    """Responds with a transcription when all requests to the model have completed."""

    def __init__(
        self,
        exchange: HttpExchange,
        model: Model,
        plan: TranscriptionPlan,
        inputs: Sequence[dict[str, WireTensor]],
        offloader: Offloader,
    ) -> None:
        super().__init__(exchange, model, inputs)
        self._plan = plan
        self._offloader = offloader
        self._parts: list[Sequence[WireTensor]] = [()] * len(inputs)

    def _take(self, part: int, response: InferResponse) -> None:
        if response.outputs:
            self._parts[part] = response.outputs

    def _fail(self, error: ConchError) -> None:
        super()._fail(named_member(error))

    def _finish(self) -> None:
        _ENCODING.start(self._exchange, self._encode(), cancel_on_disconnect=True)

    async def _encode(self) -> None:
        size = sum([len(tensor.data) for part in self._parts for tensor in part])
        body = await self._offloader.run(size, work.transcription_body, self._plan, self._parts)
        content_type = EVENTS if self._plan.stream else (b"Content-Type", CONTENT_TYPES[self._plan.format])
        self._exchange.respond(200, [content_type], body)


class Transcriptions:
    """The handlers; each responds to its exchange or raises :class:`ConchError`."""

    def __init__(self, server: InferenceServer, offloader: Offloader) -> None:
        self._server = server
        self._offloader = offloader
        self._requests = ModelRequests(server, offloader)

    def transcribe(self, exchange: HttpExchange) -> None:
        """Handle ``POST /v1/audio/transcriptions``."""
        self._start(exchange, "transcribe")

    def translate(self, exchange: HttpExchange) -> None:
        """Handle ``POST /v1/audio/translations``."""
        self._start(exchange, "translate")

    def _start(self, exchange: HttpExchange, task: str) -> None:
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
        signatures = [(name, self._server.signature(name)) for name in self._server.ready_models()]
        names = [f"'{name}'" for name, signature in signatures if signature is not None and transcribes(signature)]
        return f"models that do: {', '.join(names[:10])}" if names else "no ready model does"

    def _responder(
        self, exchange: HttpExchange, model: Model, plan: TranscriptionPlan, inputs: list[dict[str, WireTensor]]
    ) -> RequestsResponder:
        return TranscriptionResponder(exchange, model, plan, inputs, self._offloader)
