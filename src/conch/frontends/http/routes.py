"""Routes HTTP requests: from method and path to the handler, with access checks.

The tables below are the whole HTTP surface, except for the routes of platforms. To add a route, add a handler, a row
here and its description in ``openapi/document.py``. ``Router`` is the application of the HTTP ports, on the event
loop.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from conch.core.errors import Code, ConchError, invalid
from conch.frontends.access_log import AccessRecord
from conch.frontends.api_keys import NO_KEYS, REFUSAL, ApiKeys
from conch.frontends.http.browsers import BrowserRules, preflight
from conch.frontends.http.control import ControlRoutes, RegionRoutes
from conch.frontends.http.dialects import ANTHROPIC, KSERVE, OPENAI, TEI, Dialect, refuse
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.inference import Inference
from conch.frontends.http.openai import OpenAi
from conch.frontends.http.openapi.document import ApiPages
from conch.frontends.http.responses import Responses
from conch.frontends.http.retrieval import DIALECTS, Retrieval
from conch.frontends.http.transcriptions import Transcriptions
from conch.frontends.loop_budget import YieldingLister
from conch.frontends.offloading.offloader import Offloader
from conch.machine import logs
from conch.server.core import InferenceServer
from conch.server.models.on_demand import LoadNeeded
from conch.server.regions import KINDS, ClientRegions
from conch.wire.retrieval.endpoints import ENDPOINTS

LOG = logging.getLogger("conch")

Handler = Callable[..., None]
#: Raises ConchError for a request that would be refused in any case; called with the handler's arguments.
Admit = Callable[..., object]

#: Maximum body (bytes), for ``infer`` with binary tensors; also the maximum of a gRPC message.
MAX_BODY_BYTES: Final = 2**31 - 1
#: Maximum body (bytes) of a request without tensors, prompts or files.
MAX_CONTROL_BODY: Final = 64 << 10
#: Bodies larger than this (bytes) are checked with ``admit`` before they are read.
_ADMIT_BODY_BYTES: Final = 64 << 10


#: The ``api`` of endpoints that need no API key and cannot be restricted: they return what every copy of conch has.
PUBLIC: Final = "public"


class HttpEndpoint(NamedTuple):
    """A regular expression for paths, and their handlers by method.

    ``api`` is the name for restrictions. ``large`` allows bodies up to ``--http-max-input-size``; ``binary`` allows
    binary tensors after the JSON. ``dialect`` is the form of errors, until the body shows another. With other methods,
    a ``hidden`` path is not found.
    """

    pattern: str
    api: str
    handlers: dict[bytes, Handler]
    admit: Admit | None = None
    large: bool = False
    binary: bool = False
    dialect: Dialect = KSERVE
    hidden: bool = False


#: Maximum number of remembered paths, and their maximum length (bytes).
_CACHE_SIZE: Final = 4096
_CACHED_LENGTH: Final = 256
#: Maximum length of the id that a client chooses for its request (bytes).
_LONGEST_REQUEST_ID: Final = 256
_REQUEST_ID: Final = b"x-request-id"
_BEARER: Final = b"Bearer "
#: Prefix of the OpenAI API; errors for unknown paths below it have OpenAI's form.
_OPENAI: Final = b"/v1/"
#: The APIs whose endpoints need no API key.
_KEYLESS: Final = ("health", PUBLIC)


@dataclass(frozen=True, slots=True)
class _Route:
    """The endpoint of a path and the arguments of its handlers."""

    endpoint: HttpEndpoint
    arguments: tuple[Any, ...] = ()


class Router:
    """Passes exchanges to their handlers.

    ``openai_only`` is for a port that serves only the OpenAI API. ``further`` are additional endpoints of this port.
    ``address`` is where it listens; empty means the address of the HTTP port. Requests other than health checks need
    one of the ``keys``, if there are any.
    """

    def __init__(
        self,
        server: InferenceServer,
        offloader: Offloader,
        lister: YieldingLister,
        *,
        openai_only: bool = False,
        further: Iterable[HttpEndpoint] = (),
        address: str = "",
        keys: ApiKeys = NO_KEYS,
    ) -> None:
        self._keys = keys
        self._openai_only = openai_only
        self._tracing = server.tracing
        self._max_input_size = server.settings.http_max_input_size
        self.keeps_names = bool(server.settings.http_header_forward_pattern)
        self._restrictions = {
            api: (rule.header.lower().encode(), rule.value.encode(), rule.header)
            for rule in server.settings.http_restricted_api
            for api in rule.apis
        }
        settings = server.settings
        self._browsers = BrowserRules(
            address or settings.http_address, settings.http_allowed_host, settings.cors_origins
        )
        control = ControlRoutes(server, offloader, lister)
        table = [] if openai_only else _kserve_table(server, offloader, control)
        table += [] if openai_only else _adapter_table(server, offloader)
        table += [*_openai_table(server, offloader, control), *_retrieval_table(server, offloader)]
        table += [*further]
        table += self._page_endpoints(table)
        #: All endpoints of the port, in the order in which they are tried.
        self.endpoints: Sequence[HttpEndpoint] = table
        self._table = [(re.compile(route.pattern), route) for route in table]
        self._known: dict[bytes, _Route] = {}

    def _page_endpoints(self, table: list[HttpEndpoint]) -> list[HttpEndpoint]:
        """Return the endpoints of the OpenAPI document of ``table``, which Triton does not have."""
        pages = ApiPages(
            table,
            keyless=_KEYLESS if self._keys else "*",
            restrictions={api: shown for api, (_, _, shown) in self._restrictions.items()},
        )
        return [
            HttpEndpoint(r"/openapi\.json", "metadata", {b"GET": pages.document}, hidden=True),
            HttpEndpoint(r"/docs", PUBLIC, {b"GET": pages.page}, hidden=True),
        ]

    def open(self, exchange: HttpExchange) -> int:
        """Find the handler and check access; returns the maximum body size."""
        try:
            route = self._known.get(exchange.path) or self._find(exchange.path)
            endpoint = route.endpoint
            handler = endpoint.handlers.get(exchange.method)
            if handler is None and endpoint.hidden:
                raise _NotFound
            exchange.dialect = endpoint.dialect
            if endpoint.dialect.request_id:
                exchange.request_id = _request_id(exchange)
                exchange.response_headers = [(endpoint.dialect.request_id, exchange.request_id)]
                exchange.began, exchange.duration_header = monotonic_ns(), endpoint.dialect.duration
            if cors := self._browsers.cors_headers(exchange.headers):
                exchange.response_headers = [*exchange.response_headers, *cors]
                if handler is None and (allowed := preflight(exchange.method, exchange.headers, endpoint.handlers)):
                    exchange.response_headers += allowed
                    exchange.route = _respond_to_preflight, ()
                    return 0
            if handler is None:
                exchange.refusal = (ConchError("Method Not Allowed"), 405)
                return 0
            if self._keys and endpoint.api not in _KEYLESS:
                exchange.client = self._keys.name_in(exchange.headers)
                if not exchange.client:
                    exchange.refusal = (ConchError(REFUSAL, reason="invalid_api_key"), 401)
                    return 0
            if endpoint.api in self._restrictions and (missing := self._missing_header(exchange, endpoint.api)):
                exchange.refusal = (ConchError(missing), endpoint.dialect.denied)
                return 0
            if (error := self._browsers.check(exchange.method, exchange.headers)) is not None:
                exchange.refusal = (error, 403)
                return 0
            exchange.route = handler, route.arguments
            if self._tracing.on:
                exchange.began = monotonic_ns()
            exchange.urgent = endpoint.api == "health"
            if endpoint.admit is not None and _may_be_large(exchange.headers):
                endpoint.admit(*route.arguments)
        except _NotFound:
            exchange.refusal = (ConchError("Not Found"), 404)
            return 0
        except LoadNeeded:
            pass  # the request waits for its model once it has arrived
        except ConchError as error:
            exchange.refusal = (error.with_traceback(None), 0)
            return 0
        if endpoint.binary and b"inference-header-content-length" in exchange.headers:
            return MAX_BODY_BYTES
        return self._max_input_size if endpoint.large else min(MAX_CONTROL_BODY, self._max_input_size)

    def methods(self, path: bytes) -> Collection[bytes]:
        """Return the methods of a path; none for an unknown path."""
        try:
            return self._find(path).endpoint.handlers.keys()
        except (_NotFound, ConchError):
            return ()

    def handle(self, exchange: HttpExchange) -> None:
        """Handle an exchange; errors that handlers raise become its response."""
        self._record(exchange)
        handler, arguments = exchange.route
        try:
            handler(exchange, *arguments)
        except LoadNeeded as needed:
            exchange.on_disconnect = needed.then(partial(self._resume, exchange))
        except ConchError as error:
            self._refuse(exchange, error)
        except Exception:
            LOG.exception("a request to %s failed", exchange.path.decode("latin-1"))
            self._refuse(exchange, ConchError("internal server error", Code.INTERNAL))

    def _resume(self, exchange: HttpExchange, load_error: ConchError | None) -> None:
        """Handle an exchange whose model is loaded, or refuse it if the load has failed."""
        if load_error is None:
            self.handle(exchange)
        else:
            self._refuse(exchange, load_error)

    def refuse(self, exchange: HttpExchange, error: ConchError, status: int) -> None:
        """Respond to a request that is not handled."""
        if exchange.path:
            self._record(exchange)
        self._refuse(exchange, error, status)

    def too_large(self, exchange: HttpExchange, size: int, limit: int) -> str:
        if limit < self._max_input_size:
            return f"a request body of {size} bytes exceeds the maximum of {limit} bytes for this path"
        return (
            f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes."
            " Use --http-max-input-size to increase the limit."
        )

    def _refuse(self, exchange: HttpExchange, error: ConchError, status: int = 0) -> None:
        if exchange.dialect is None:  # a path without a route
            exchange.dialect = OPENAI if self._openai_only or exchange.path.startswith(_OPENAI) else KSERVE
        refuse(exchange, error, status)

    def _record(self, exchange: HttpExchange) -> None:
        """Create the access log record of an exchange."""
        if logs.current().logs_calls:
            exchange.record = AccessRecord(
                "HTTP",
                exchange.method.decode(),
                exchange.path.decode("latin-1"),
                client=exchange.client,
                request_id=(exchange.request_id or exchange.headers.get(_REQUEST_ID, b"")).decode("latin-1"),
                traceparent=exchange.headers.get(b"traceparent", b"").decode("latin-1"),
                received=len(exchange.body),
            )

    def _find(self, path: bytes) -> _Route:
        text = path.decode("utf-8", "replace")
        for pattern, endpoint in self._table:
            match = pattern.fullmatch(text)
            if match is not None:
                route = _Route(endpoint, _arguments(match))
                if len(path) < _CACHED_LENGTH and len(self._known) < _CACHE_SIZE:
                    self._known[path] = route
                return route
        raise _NotFound

    def _missing_header(self, exchange: HttpExchange, api: str) -> str:
        """Return the message that refuses a request to a restricted API; empty if it is allowed."""
        header, value, shown = self._restrictions[api]
        allowed = hmac.compare_digest(exchange.headers.get(header, b""), value)
        if header == b"authorization" and value.startswith(_BEARER):  # Anthropic's clients send keys elsewhere
            key = exchange.headers.get(b"x-api-key", b"")
            allowed |= hmac.compare_digest(_BEARER + key, value)
        return "" if allowed else f"This API is restricted, expecting header '{shown}'"


def _respond_to_preflight(exchange: HttpExchange) -> None:
    exchange.respond(204, [])


def _request_id(exchange: HttpExchange) -> bytes:
    """Return the id of a request: the client's, or a new one."""
    given = exchange.headers.get(_REQUEST_ID, b"")
    return given if 0 < len(given) <= _LONGEST_REQUEST_ID else f"req_{os.urandom(16).hex()}".encode()


def _may_be_large(headers: dict[bytes, bytes]) -> bool:
    """Whether a body may be large enough to check the request before reading it."""
    length = headers.get(b"content-length")
    return int(length) > _ADMIT_BODY_BYTES if length is not None else b"transfer-encoding" in headers


def _kserve_table(server: InferenceServer, offloader: Offloader, control: ControlRoutes) -> list[HttpEndpoint]:
    """Return the routes of the KServe protocol with Triton's extensions."""
    get, post = b"GET", b"POST"
    inference = Inference(server, offloader)
    logging_handlers = {get: control.log_settings, post: control.change_log_settings}
    trace_handlers = {get: control.trace_setting, post: control.change_trace_setting}
    model = _MODEL
    repository = r"/v2/repository(?:/(?P<repository>[^/]+))?"
    return [
        HttpEndpoint(r"/v2", "metadata", {get: control.server_metadata}),
        HttpEndpoint(r"/v2/health/live", "health", {get: control.live}),
        HttpEndpoint(r"/v2/health/ready", "health", {get: control.ready}),
        HttpEndpoint(r"/v2/models/stats", "statistics", {get: control.statistics}),
        HttpEndpoint(r"/v2/logging", "logging", logging_handlers),
        HttpEndpoint(
            rf"{model}/infer", "inference", {post: inference.infer}, inference.admit_infer, large=True, binary=True
        ),
        HttpEndpoint(rf"{model}/generate", "inference", {post: inference.generate}, inference.admit, large=True),
        HttpEndpoint(
            rf"{model}/generate_stream", "inference", {post: inference.generate_stream}, inference.admit, large=True
        ),
        HttpEndpoint(rf"{model}/ready", "health", {get: control.model_ready}),
        HttpEndpoint(rf"{model}/config", "model-config", {get: control.config}),
        HttpEndpoint(rf"{model}/stats", "statistics", {get: control.statistics}),
        HttpEndpoint(model, "metadata", {get: control.model_metadata}),
        HttpEndpoint(r"/v2/repository(?:/[^/]+)?/index", "model-repository", {post: control.index}),
        HttpEndpoint(
            rf"{repository}/models/(?P<name>[^/]+)/load",
            "model-repository",
            {post: control.load},
            control.admit,
            large=True,
        ),
        HttpEndpoint(rf"{repository}/models/(?P<name>[^/]+)/unload", "model-repository", {post: control.unload}),
        HttpEndpoint(r"/v2/trace/setting", "trace", trace_handlers),
        HttpEndpoint(r"/v2/models/(?P<traced>[^/]+)/trace/setting", "trace", trace_handlers),
        *_region_endpoints(server.regions),
    ]


def _region_endpoints(regions: ClientRegions) -> Iterator[HttpEndpoint]:
    """Yield the routes of client shared memory."""
    for kind, name in KINDS.items():
        handlers = RegionRoutes(regions, kind)
        path = rf"/v2/{name.lower()}sharedmemory(?:/region/(?P<region>[^/]+))?"
        yield HttpEndpoint(rf"{path}/status", "shared-memory", {b"GET": handlers.status})
        yield HttpEndpoint(rf"{path}/register", "shared-memory", {b"POST": handlers.register})
        yield HttpEndpoint(rf"{path}/unregister", "shared-memory", {b"POST": handlers.unregister})


#: The routes that generate text: the endpoint, and its dialect.
_GENERATION: Final = {
    r"/v1/chat/completions": ("chat", OPENAI),
    r"/v1/completions": ("completion", OPENAI),
    r"/v1/messages": ("message", ANTHROPIC),
    r"/v1/messages/count_tokens": ("message_count", ANTHROPIC),
}
_RECORDINGS: Final = {r"/v1/audio/transcriptions": "transcribe", r"/v1/audio/translations": "translate"}


def _openai_table(server: InferenceServer, offloader: Offloader, control: ControlRoutes) -> Iterator[HttpEndpoint]:
    """Yield the routes of OpenAI's and Anthropic's APIs, and the health check of Triton's OpenAI front end."""
    get, post, api = b"GET", b"POST", "inference"
    openai = OpenAi(server, offloader)
    responses = Responses(server, openai, offloader)
    recordings = Transcriptions(server, offloader)
    yield HttpEndpoint(r"/v1/models", "metadata", {get: openai.models}, dialect=OPENAI)
    yield HttpEndpoint(r"/v1/models/(?P<id>.+)", "metadata", {get: openai.model}, dialect=OPENAI)
    for path, (endpoint, dialect) in _GENERATION.items():
        yield HttpEndpoint(path, api, {post: openai.handler(endpoint)}, large=True, dialect=dialect)
    response = r"/v1/responses/(?P<id>[^/]+)"
    yield HttpEndpoint(r"/v1/responses", api, {post: responses.create}, large=True, dialect=OPENAI)
    yield HttpEndpoint(response, api, {get: responses.retrieve, b"DELETE": responses.remove}, dialect=OPENAI)
    yield HttpEndpoint(rf"{response}/input_items", api, {get: responses.input_items}, dialect=OPENAI)
    for path, task in _RECORDINGS.items():
        yield HttpEndpoint(path, api, {post: recordings.handler(task)}, large=True, dialect=OPENAI)
    yield HttpEndpoint(r"/version", "metadata", {get: openai.version}, dialect=OPENAI)
    yield HttpEndpoint(r"/health/ready", "health", {get: control.ready}, dialect=OPENAI)


def _adapter_table(server: InferenceServer, offloader: Offloader) -> list[HttpEndpoint]:
    """Return vLLM's routes for LoRA adapters, which a port with only OpenAI's API does not have."""
    openai = OpenAi(server, offloader)
    return [
        HttpEndpoint(rf"/v1/{name}_lora_adapter", "model-repository", {b"POST": handler}, dialect=OPENAI)
        for name, handler in (("load", openai.load_adapter), ("unload", openai.unload_adapter))
    ]


#: The routes of retrieval: the paths, and the endpoint. A model is named in the body, or by ``_MODEL`` before the path.
_RETRIEVAL: Final = {
    r"/v1/embeddings": "embeddings",
    r"/v2/embed": "cohere_embed",
    r"/v1/embed": "cohere_embed_v1",
    r"(?:/v1)?/rerank": "cohere_rerank",
    r"/v2/rerank": "cohere_rerank_v2",
    r"(?:/v1)?/score": "vllm_score",
    r"(?:/v1)?/classify": "vllm_classify",
    r"(?:/v1)?/pooling": "vllm_pooling",
    r"/tokenize": "vllm_tokenize",
    r"/detokenize": "vllm_detokenize",
    r"/": "tei_root",
    r"/embed": "tei_embed",
    r"/embed_sparse": "tei_embed_sparse",
    r"/embed_all": "tei_embed_all",
    r"/predict": "tei_predict",
    r"/similarity": "tei_similarity",
    r"/decode": "tei_decode",
}
#: The routes below a model, all of TEI.
_BELOW_MODELS: Final = ("embed", "embed_sparse", "embed_all", "rerank", "predict", "similarity", "tokenize", "decode")
_MODEL: Final = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"


def _retrieval_table(server: InferenceServer, offloader: Offloader) -> Iterator[HttpEndpoint]:
    """Yield the routes of retrieval in all client APIs."""
    retrieval = Retrieval(server, offloader)
    paths = {**_RETRIEVAL, **{rf"{_MODEL}/{name}": f"tei_{name}" for name in _BELOW_MODELS}}
    for path, endpoint in paths.items():
        dialect = DIALECTS[ENDPOINTS[endpoint].api]
        handlers = {b"POST": retrieval.handler(endpoint)}
        hidden = path == "/"  # Triton has no such path
        yield HttpEndpoint(path, "inference", handlers, large=True, dialect=dialect, hidden=hidden)
    yield HttpEndpoint(rf"(?:{_MODEL})?/info", "metadata", {b"GET": retrieval.info}, dialect=TEI)
    yield HttpEndpoint(r"/(?:health|ping)", "health", {b"GET": retrieval.health}, dialect=TEI)


def _arguments(match: re.Match[str]) -> tuple[Any, ...]:
    groups = match.groupdict()
    if groups.get("model") is not None:
        return unquote(groups["model"]), _version(groups["version"])
    if "traced" in groups:
        return (unquote(groups["traced"]),)
    if "file" in groups:
        return (groups["file"],)
    if "id" in groups:
        return (unquote(groups["id"]),)
    if "target" in groups:
        return (unquote(groups["target"]),)
    if "region" in groups:
        return (unquote(groups["region"] or ""),)
    if "name" in groups:
        return unquote(groups["repository"] or ""), unquote(groups["name"])
    return ()


def _version(text: str | None) -> int:
    if text is None:
        return -1
    version = int(text) if len(text) < 20 else 2**64
    if version >= 2**63:
        raise invalid(
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
    return version


class _NotFound(Exception):
    """Raised for a path without a route."""
