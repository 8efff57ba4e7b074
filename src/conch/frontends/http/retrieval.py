"""Handlers of the client APIs of retrieval: OpenAI's embeddings, Cohere's, Jina's, TEI's and vLLM's routes.

``wire.retrieval`` translates bodies; the handlers find the model and send its responses. The router calls them on the
event loop; a process decodes large bodies and encodes large responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from conch.core.errors import Code, ConchError, unavailable
from conch.core.inference import InferRequest, ignore
from conch.core.tensors import WireTensor
from conch.frontends.http import dialects
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.model_requests import JoinedResponder, ModelRequests, Translation
from conch.frontends.offloading import work
from conch.frontends.offloading.offloader import Offloader
from conch.server.core import InferenceServer
from conch.server.model import Model
from conch.wire.openai.reading import ApiError
from conch.wire.retrieval import endpoints
from conch.wire.retrieval.endpoints import ENDPOINTS
from conch.wire.retrieval.models import Kind, kinds
from conch.wire.retrieval.plans import RetrievalPlan
from conch.wire.retrieval.tei import info_body

DIALECTS: Final = {
    endpoints.OPENAI: dialects.OPENAI, endpoints.COHERE: dialects.COHERE, endpoints.TEI: dialects.TEI,
}  # fmt: skip
_REQUEST_ID: Final = b"x-request-id"
#: The kinds of models that TEI serves, which ``/`` and ``/info`` are about.
_TEI_KINDS: Final = (Kind.DENSE, Kind.SPARSE, Kind.MULTI_VECTOR, Kind.RANKER, Kind.CLASSIFIER)


class RetrievalResponder(JoinedResponder):
    """Responds with the results of all requests to the model, as one body."""

    def __init__(
        self,
        exchange: HttpExchange,
        model: Model,
        plan: RetrievalPlan,
        inputs: Sequence[dict[str, WireTensor]],
        *,
        offloader: Offloader,
    ) -> None:
        id, parameters = exchange.headers.get(_REQUEST_ID, b"").decode("latin-1"), plan.parameters
        requests = [
            InferRequest(model.name, tensors, ignore, id=id, outputs=plan.outputs, parameters=parameters)
            for tensors in inputs
        ]
        super().__init__(exchange, requests, offloader)
        self._plan = plan

    def _client_error(self, part: int, error: ConchError) -> ConchError:
        return self._plan.client_error(part, error)

    async def _encode(self) -> None:
        body = await self._offloader.run(self._size, work.retrieval_body, self._plan, self._model, self._parts)
        self._exchange.respond(200, [JSON], body)


class Retrieval:
    """The handlers; each responds to its exchange or raises :class:`ConchError`."""

    def __init__(self, server: InferenceServer, offloader: Offloader) -> None:
        self._server = server
        self._requests = ModelRequests(server, offloader)
        self._responder = partial(RetrievalResponder, offloader=offloader)

    def handler(self, endpoint: str) -> Callable[..., None]:
        """Return the handler of one of ``ENDPOINTS``, whose path may name a model and its version."""
        return partial(self._start, endpoint)

    def health(self, exchange: HttpExchange) -> None:
        """Handle ``GET /health``: 200, or 503 while the server is not ready."""
        if not self._server.ready:
            raise unavailable("the server is not ready")
        exchange.respond(200, [JSON])

    def info(self, exchange: HttpExchange, name: str = "", version: int = -1) -> None:
        """Handle ``GET /info``: describe the model in the path, or the only one that TEI could serve."""
        model = self._server.model(name, version) if name else self._only_model(_TEI_KINDS)
        exchange.respond(200, [JSON], info_body(model.signature, model.statistics.runtime_facts))

    def _start(self, endpoint: str, exchange: HttpExchange, name: str = "", version: int = -1) -> None:
        find = partial(self._find, exchange, version)
        self._requests.start(exchange, Translation(work.retrieval, (endpoint, name), find, self._responder))

    def _find(self, exchange: HttpExchange, version: int, chosen: Sequence[str]) -> Model:
        """Return the model of a request to one of ``ENDPOINTS``, whose errors the exchange gets from now on.

        ``chosen`` is the endpoint and the name of the model, which may be empty.
        """
        endpoint, name = chosen
        own = ENDPOINTS[endpoint]
        exchange.dialect = DIALECTS[own.api]
        if not name:
            return self._only_model(own.kinds, own.other_kinds)
        return self._requests.find_model(name) if version == -1 else self._server.model(name, version)

    def _only_model(self, accepted: Sequence[Kind], others: Sequence[Kind] = ()) -> Model:
        """Return the only model of one of the ``accepted`` kinds, or else of ``others``, for requests that name none.

        A model that was never loaded has an unknown kind, and counts if no other model does. Raises UNSUPPORTED if
        there is none (UNAVAILABLE while models are being loaded), INVALID_ARG if there are several.
        """
        names, second, unknown = [], [], []
        for name, signature in self._server.signatures().items():
            if signature is None:
                unknown.append(name)
            elif any(kind in accepted for kind in kinds(signature)):
                names.append(name)
            elif any(kind in others for kind in kinds(signature)):
                second.append(name)
        names = names or second or unknown
        if len(names) > 1:
            shown = ", ".join(f"'{name}'" for name in names[:10]) + (", …" if len(names) > 10 else "")
            raise ApiError(f"several models can serve this request: name one of {shown} in 'model'", "model")
        if not names and not self._server.ready:
            raise unavailable("the server is not ready: models are being loaded")
        if not names:
            wanted = " or ".join(kind.value for kind in accepted)
            raise ApiError(f"no model of this server {wanted}", "model", code=Code.UNSUPPORTED)
        return self._server.model(names[0])
