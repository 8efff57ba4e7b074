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
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.model_requests import JoinedResponder, ModelRequests, Translation
from conch.frontends.http.responders import EVENTS
from conch.frontends.offloading import work
from conch.frontends.offloading.offloader import Offloader
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.server.models.on_demand import LoadNeeded
from conch.wire.openai.models import transcribes
from conch.wire.openai.reading import ApiError
from conch.wire.transcriptions import CONTENT_TYPES, TranscriptionPlan, named_member


class TranscriptionResponder(JoinedResponder):
    """Responds with a transcription."""

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

    def _fail(self, error: ConchError) -> None:
        super()._fail(named_member(error))

    async def _encode(self) -> None:
        body = await self._offloader.run(self._size, work.transcription_body, self._plan, self._parts)
        content_type = EVENTS if self._plan.stream else (b"Content-Type", CONTENT_TYPES[self._plan.format])
        self._exchange.respond(200, [content_type], body)


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
