"""From a method and a path to the handler, and who may call it.

The tables below are the whole HTTP surface.  ``Router`` is the application of the HTTP ports; runs on the event loop.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from conch import logs
from conch.errors import Code, ConchError, invalid
from conch.frontends.access_log import AccessRecord
from conch.frontends.codec.pool import Codec
from conch.frontends.http.connection import MAX_BODY_BYTES
from conch.frontends.http.control import ControlRoutes
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.inference import Inference
from conch.frontends.http.openai import OpenAi
from conch.frontends.http.openai_status import refuse as refuse_openai
from conch.frontends.http.status import refuse as refuse_kserve
from conch.server.core import InferenceServer
from conch.wire.json.control import error_body
from conch.wire.openai.errors import error_body as openai_error_body

LOG = logging.getLogger("conch")

Handler = Callable[..., None]
#: A regular expression for paths, the API that they belong to (as restrictions name it), and a handler per method.
_Row = tuple[str, str, dict[bytes, Handler]]

#: How many paths are remembered with their routes, and how long they may be (bytes).
_CACHE_SIZE: Final = 4096
_CACHED_LENGTH: Final = 256
#: How the paths of the OpenAI API begin; errors below it have OpenAI's form.
_OPENAI: Final = b"/v1/"


@dataclass(frozen=True, slots=True)
class _Route:
    """The meaning of a path: its API (as restrictions name it), a handler per method, and the handler's arguments."""

    api: str
    handlers: dict[bytes, Handler]
    arguments: tuple[Any, ...] = ()


class Router:
    """Passes exchanges to their handlers; ``openai_only`` is for a port that has nothing but the OpenAI API."""

    def __init__(self, server: InferenceServer, codec: Codec, *, openai_only: bool = False) -> None:
        self._openai_only = openai_only
        self._max_input_size = server.settings.http_max_input_size
        self._restrictions = {
            api: (rule.header.lower().encode(), rule.value.encode(), rule.header)
            for rule in server.settings.http_restricted_api
            for api in rule.apis
        }
        control = ControlRoutes(server, codec)
        table = (_openai_table if openai_only else _kserve_table)(server, codec, control)
        if not openai_only:
            table += _openai_table(server, codec, control)
        self._table = [(re.compile(pattern), api, handlers) for pattern, api, handlers in table]
        self._known: dict[bytes, _Route] = {}

    def handle(self, exchange: HttpExchange) -> None:
        """Answer an exchange; errors that handlers raise become its response."""
        if logs.current().log_verbose_level:
            what = f"{exchange.method.decode()} {logs.shortened(exchange.path.decode('latin-1'))}"
            logs.verbose(1, "HTTP request: %s", what)
            exchange.record = AccessRecord("HTTP", what, len(exchange.body))
        openai = self._openai_only or exchange.path.startswith(_OPENAI)
        refuse = refuse_openai if openai else refuse_kserve
        try:
            route = self._known.get(exchange.path) or self._find(exchange.path)
            handler = route.handlers.get(exchange.method)
            if handler is None:
                refuse(exchange, ConchError("Method Not Allowed"), 405)
                return
            if route.api in self._restrictions and (missing := self._missing_header(exchange, route.api)):
                refuse(exchange, ConchError(missing), 401 if openai else 403)
                return
            handler(exchange, *route.arguments)
        except _NotFound:
            refuse(exchange, ConchError("Not Found"), 404)
        except ConchError as error:
            refuse(exchange, error)
        except Exception:
            LOG.exception("a request to %s failed", exchange.path.decode("latin-1"))
            refuse(exchange, ConchError("internal server error", Code.INTERNAL))

    def body_limit(self, exchange: HttpExchange) -> int:
        """The limit for JSON is a setting, that for binary tensors what the protocol can express."""
        return MAX_BODY_BYTES if b"inference-header-content-length" in exchange.headers else self._max_input_size

    def too_large(self, size: int, limit: int) -> str:
        return (
            f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes."
            " Use --http-max-input-size to increase the limit."
        )

    def error_body(self, message: str) -> bytes:
        return openai_error_body(400, ConchError(message)) if self._openai_only else error_body(message)

    def _find(self, path: bytes) -> _Route:
        text = path.decode("utf-8", "replace")
        for pattern, api, handlers in self._table:
            match = pattern.fullmatch(text)
            if match is not None:
                route = _Route(api, handlers, _arguments(match))
                if len(path) < _CACHED_LENGTH and len(self._known) < _CACHE_SIZE:
                    self._known[path] = route
                return route
        raise _NotFound

    def _missing_header(self, exchange: HttpExchange, api: str) -> str:
        """The message that refuses a request to a restricted API; empty if it is allowed."""
        header, value, shown = self._restrictions[api]
        allowed = exchange.headers.get(header) == value
        return "" if allowed else f"This API is restricted, expecting header '{shown}'"


def _kserve_table(server: InferenceServer, codec: Codec, control: ControlRoutes) -> list[_Row]:
    """The routes of the KServe protocol with Triton's extensions."""
    get, post = b"GET", b"POST"
    inference = Inference(server, codec)
    logging_handlers = {get: control.log_settings, post: control.change_log_settings}
    missing = {get: control.not_available, post: control.not_available}
    model = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[0-9]+))?"
    repository = r"/v2/repository(?:/(?P<repository>[^/]+))?"
    return [
        (r"/v2", "metadata", {get: control.server_metadata}),
        (r"/v2/health/live", "health", {get: control.live}),
        (r"/v2/health/ready", "health", {get: control.ready}),
        (r"/v2/models/stats", "statistics", {get: control.statistics}),
        (r"/v2/logging", "logging", logging_handlers),
        (rf"{model}/infer", "inference", {post: inference.infer}),
        (rf"{model}/generate", "inference", {post: inference.generate}),
        (rf"{model}/generate_stream", "inference", {post: inference.generate_stream}),
        (rf"{model}/ready", "health", {get: control.model_ready}),
        (rf"{model}/config", "model-config", {get: control.config}),
        (rf"{model}/stats", "statistics", {get: control.statistics}),
        (model, "metadata", {get: control.model_metadata}),
        (r"/v2/repository(?:/[^/]+)?/index", "model-repository", {post: control.index}),
        (rf"{repository}/models/(?P<name>[^/]+)/load", "model-repository", {post: control.load}),
        (rf"{repository}/models/(?P<name>[^/]+)/unload", "model-repository", {post: control.unload}),
        (r"/v2(?:/models/[^/]+)?/trace/setting", "trace", missing),
        (r"/v2/(?:system|cuda)sharedmemory(?:/region/[^/]+)?/status", "shared-memory", {get: missing[get]}),
        (
            r"/v2/(?:system|cuda)sharedmemory(?:/region/[^/]+)?/(?:un)?register",
            "shared-memory",
            {post: missing[post]},
        ),
    ]


def _openai_table(server: InferenceServer, codec: Codec, control: ControlRoutes) -> list[_Row]:
    """The routes of the OpenAI API, and the health check that Triton's front end for it has."""
    get, post = b"GET", b"POST"
    openai = OpenAi(server, codec)
    return [
        (r"/v1/models", "metadata", {get: openai.models}),
        (r"/v1/models/(?P<id>.+)", "metadata", {get: openai.model}),
        (r"/v1/chat/completions", "inference", {post: openai.chat}),
        (r"/v1/completions", "inference", {post: openai.completion}),
        (r"/v1/embeddings", "inference", {post: openai.embedding}),
        (r"/health/ready", "health", {get: control.ready}),
    ]


def _arguments(match: re.Match[str]) -> tuple[Any, ...]:
    groups = match.groupdict()
    if "model" in groups:
        return unquote(groups["model"]), _version(groups["version"])
    if "id" in groups:
        return (unquote(groups["id"]),)
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
    """No route has this path."""
