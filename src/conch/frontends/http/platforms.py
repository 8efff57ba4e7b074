"""Adapters for managed platforms: Amazon SageMaker, Google Vertex AI and OCI Data Science.

Each platform has its own port. Its router translates requests and passes them to the handlers and checks of the HTTP
port, on the event loop. Sources: SageMaker's contracts for inference containers and multi-model containers, Vertex AI's
requirements for custom containers, Triton's additions to both, and OCI's interface for custom containers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import quote, unquote

from conch.core.errors import Code, ConchError, invalid, not_found
from conch.frontends.http.background_tasks import start_work
from conch.frontends.http.exchange import JSON, HttpExchange
from conch.frontends.http.routes import HttpEndpoint, Router
from conch.options.settings import Settings
from conch.repository.model_files import CONFIG_FILE
from conch.server.core import InferenceServer
from conch.wire.json import control as wire
from conch.wire.json.text import dumps

_SAGEMAKER_BINARY: Final = b"application/vnd.sagemaker-triton.binary+json;json-header-size="
_VERTEX_AI_BINARY: Final = b"application/vnd.vertex-ai-triton.binary+json;json-header-size="
_REDIRECT: Final = b"x-vertex-ai-triton-redirect"
_LENGTH: Final = b"inference-header-content-length"
_INVOKE: Final = re.compile(rb"/models/([^/]+)/invoke")
_MODELS: Final = re.compile(rb"/models(/[^/]*)?")
_PING_MODES: Final = ("live", "ready")
_INFERENCE_TYPES: Final = ("infer", "generate", "generate_stream")
#: OCI's paths, and the environment variables with which a deployment maps two of them.
_OCI_PREDICT: Final = b"/predict"
_OCI_STREAM: Final = b"/predictWithResponseStream"
_OCI_HEALTH: Final = b"/health"
_OCI_PREDICT_VARIABLE: Final = "MODEL_DEPLOY_PREDICT_ENDPOINT"
_OCI_HEALTH_VARIABLE: Final = "MODEL_DEPLOY_HEALTH_ENDPOINT"


class Platform(Protocol):
    """The request format of a platform."""

    def translate(self, exchange: HttpExchange, router: Router) -> bool:
        """Rewrite a request as one of the HTTP port; False for a path that the platform does not use."""


class PlatformRouter:
    """The application of a platform's port."""

    keeps_names = False

    def __init__(self, router: Router, platform: Platform) -> None:
        self._router = router
        self._platform = platform

    def open(self, exchange: HttpExchange) -> int:
        try:
            known = self._platform.translate(exchange, self._router)
        except ConchError as error:
            exchange.refusal = (error, 0)
            return 0
        if not known:
            exchange.refusal = (ConchError("Not Found"), 400)  # the same status as Triton's platform ports
            return 0
        return self._router.open(exchange)

    def handle(self, exchange: HttpExchange) -> None:
        self._router.handle(exchange)

    def refuse(self, exchange: HttpExchange, error: ConchError, status: int) -> None:
        self._router.refuse(exchange, error, status)

    def too_large(self, exchange: HttpExchange, size: int, limit: int) -> str:
        return self._router.too_large(exchange, size, limit)


class SageMaker:
    """``/ping`` and ``/invocations`` for one model; ``/models`` for the loaded ``models`` by name.

    Environment variables: ``SAGEMAKER_TRITON_DEFAULT_MODEL_NAME`` names the model; ``SAGEMAKER_TRITON_PING_MODE``
    selects the check of ``/ping`` (``live`` or ``ready``); ``SAGEMAKER_TRITON_INFERENCE_TYPE`` selects the endpoint of
    ``/invocations`` (``infer``, ``generate`` or ``generate_stream``). Raises INVALID_ARG for another mode or type.
    """

    def __init__(self, environment: Mapping[str, str], models: Container[str]) -> None:
        self._models = models
        default = "unspecified_SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
        self._model = environment.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", default)
        mode = environment.get("SAGEMAKER_TRITON_PING_MODE", "ready")
        if mode not in _PING_MODES:
            raise invalid(f"SAGEMAKER_TRITON_PING_MODE is '{mode}'; it must be 'live' or 'ready'")
        self._ping = f"/v2/health/{mode}".encode()
        kind = environment.get("SAGEMAKER_TRITON_INFERENCE_TYPE", "infer")
        if kind not in _INFERENCE_TYPES:
            raise invalid(
                f"SAGEMAKER_TRITON_INFERENCE_TYPE is '{kind}'; it must be one of {', '.join(_INFERENCE_TYPES)}"
            )
        self._kind = kind.encode()

    def translate(self, exchange: HttpExchange, router: Router) -> bool:
        path = exchange.path
        if path == b"/ping":
            exchange.path = self._ping
        elif path == b"/invocations":
            self._infer(exchange, quote(self._model, safe="").encode(), self._kind)
        elif (invoked := _INVOKE.fullmatch(path)) is not None:
            if (name := unquote(invoked[1].decode("utf-8", "replace"))) not in self._models:
                raise not_loaded(name)
            self._infer(exchange, invoked[1])
        elif _MODELS.fullmatch(path) is None:
            return False
        return True

    def _infer(self, exchange: HttpExchange, model: bytes, kind: bytes = b"infer") -> None:
        exchange.path = b"/v2/models/%b/%b" % (model, kind)
        # The platform does not pass on the protocol's own headers.
        exchange.headers.pop(_LENGTH, None)
        if kind == b"infer":
            _take_header_size(exchange, _SAGEMAKER_BINARY)
            exchange.binary_type = _SAGEMAKER_BINARY


class VertexAi:
    """The routes for one model, named by ``AIP_HEALTH_ROUTE`` and ``AIP_PREDICT_ROUTE``.

    The header ``X-Vertex-Ai-Triton-Redirect`` of a predict request selects any other endpoint. ``default_model``
    returns the model's name. Raises INVALID_ARG if a route is not set.
    """

    def __init__(self, environment: Mapping[str, str], default_model: Callable[[], str]) -> None:
        self._health, self._predict = (
            environment.get(name, "").encode() for name in ("AIP_HEALTH_ROUTE", "AIP_PREDICT_ROUTE")
        )
        for name, route in (("AIP_PREDICT_ROUTE", self._predict), ("AIP_HEALTH_ROUTE", self._health)):
            if not route:
                raise invalid(f"{name} is not defined for Vertex AI endpoint")
        self._default_model = default_model

    def translate(self, exchange: HttpExchange, router: Router) -> bool:
        if exchange.path == self._health:
            exchange.path = b"/v2/health/ready"
        elif exchange.path != self._predict:
            return False
        elif exchange.method == b"POST" and (path := exchange.headers.get(_REDIRECT)) is not None:
            exchange.path = b"/" + path
            methods = router.methods(exchange.path)
            if not path or not methods:
                return False
            if b"POST" not in methods:
                exchange.method = b"GET"
        else:
            exchange.path = b"/v2/models/%b/infer" % quote(self._default_model(), safe="").encode()
        _take_header_size(exchange, _VERTEX_AI_BINARY)
        return True


class OciDataScience:
    """``/predict``, ``/predictWithResponseStream`` and ``/health``, and the HTTP port's paths unchanged.

    A deployment that maps its endpoints (``MODEL_DEPLOY_PREDICT_ENDPOINT``, ``MODEL_DEPLOY_HEALTH_ENDPOINT``) requests
    those paths; if the platform leaves the mapping to the container, this class applies it. Without a mapping,
    ``/predict`` is ``infer`` on the model that ``default_model`` returns. Raises INVALID_ARG if a variable is not a
    path.
    """

    def __init__(self, environment: Mapping[str, str], default_model: Callable[[], str]) -> None:
        self._predict, self._health = (
            _mapped(environment, *variable)
            for variable in ((_OCI_PREDICT_VARIABLE, _OCI_PREDICT), (_OCI_HEALTH_VARIABLE, _OCI_HEALTH))
        )
        self._default_model = default_model

    def translate(self, exchange: HttpExchange, router: Router) -> bool:
        if exchange.path == _OCI_HEALTH:
            exchange.path = self._health or b"/v2/health/ready"
        elif exchange.path == _OCI_PREDICT:
            exchange.path = self._predict or self._of_default_model(b"infer")
        elif exchange.path == _OCI_STREAM:
            exchange.path = self._predict or self._of_default_model(b"generate")
            if exchange.path.endswith(b"/generate"):
                exchange.path += b"_stream"
        return True

    def _of_default_model(self, kind: bytes) -> bytes:
        return b"/v2/models/%b/%b" % (quote(self._default_model(), safe="").encode(), kind)


def check_ports(settings: Settings) -> None:
    """Raise INVALID_ARG if the settings use a port outside the range that SageMaker allows."""
    for low, high in settings.sagemaker_safe_port_range[-1:]:
        for name, listener in settings.listeners.items():
            if name != "sagemaker" and listener.allowed and not low <= listener.port <= high:
                raise invalid(f"--{name}-port={listener.port} is outside of --sagemaker-safe-port-range={low}-{high}")


def not_loaded(name: str) -> ConchError:
    """Return the error for a model that SageMaker has not loaded."""
    return not_found(f"model '{name}' is not loaded")


def only_model(server: InferenceServer, named: str, flag: str = "vertex-ai-default-model") -> str:
    """Return the model of requests that name none: ``named``, the value of the flag, or the only ready model.

    Raises INVALID_ARG if there is not exactly one.
    """
    if named:
        return named
    names = server.ready_models()
    if len(names) != 1:
        raise invalid(
            "Expect the model repository contains only a single model if default model is not specified:"
            f" --{flag} names it"
        )
    return names[0]


def _take_header_size(exchange: HttpExchange, binary: bytes) -> None:
    """Move the size of the JSON before binary tensors from the content type to its header."""
    content = exchange.headers.get(b"content-type", b"")
    if content.startswith(binary):
        exchange.headers[_LENGTH] = content.removeprefix(binary)


def _mapped(environment: Mapping[str, str], variable: str, own: bytes) -> bytes:
    """Return the path that a variable maps the platform's ``own`` path to; empty if it is not mapped elsewhere."""
    path = environment.get(variable, "").encode()
    if path and not path.startswith(b"/"):
        raise invalid(f"{variable} is '{path.decode()}', and must be a path that begins with '/'")
    return b"" if path == own else path


#: The directory of the platform's models; requests cannot load from any other path.
SAGEMAKER_MODELS: Final = Path("/opt/ml/models")
_URL: Final = re.compile(r"[0-9A-Za-z._-]+/model(?:/[0-9A-Za-z._-]+)?/?")


class SageMakerModels:
    """Loads, lists and unloads models for SageMaker's multi-model endpoints; the platform downloads them.

    ``endpoints`` are the routes of ``/models``. Models are served under the platform's names.
    """

    def __init__(self, server: InferenceServer, models: Path = SAGEMAKER_MODELS) -> None:
        self._server = server
        self._models = models

    @property
    def endpoints(self) -> list[HttpEndpoint]:
        api = "model-repository"
        return [
            HttpEndpoint(r"/models/?", api, {b"GET": self.list, b"POST": self.load}),
            HttpEndpoint(r"/models/(?P<target>[^/]+)", api, {b"GET": self.show, b"DELETE": self.unload}),
        ]

    def list(self, exchange: HttpExchange) -> None:
        shown = [_shown(name, path) for name, path in sorted(self._server.repository.registered.items())]
        exchange.respond(200, [JSON], dumps({"models": shown}))

    def show(self, exchange: HttpExchange, name: str) -> None:
        path = self._server.repository.registered.get(name)
        if path is None:
            raise not_loaded(name)
        exchange.respond(200, [JSON], dumps(_shown(name, path)))

    def load(self, exchange: HttpExchange) -> None:
        name, url = wire.read_sagemaker_model(exchange.body)
        path = Path(url)
        beyond = url.removeprefix(f"{self._models}/")
        if beyond == url or ".." in path.parts or not _URL.fullmatch(beyond):
            raise invalid(f"'{url}' is not a model of SageMaker's: expected {self._models}/<identifier>/model")
        self._server.require_explicit_control()
        start_work(exchange, self._load(exchange, name, path))

    def unload(self, exchange: HttpExchange, name: str) -> None:
        if name not in self._server.repository.registered:
            raise not_loaded(name)
        start_work(exchange, self._unload(exchange, name))

    async def _load(self, exchange: HttpExchange, name: str, path: Path) -> None:
        directories = self._server.repository.registered
        directory = None if name in directories else await asyncio.to_thread(_model_in, path)
        if name in directories:
            message = f"model repository '{path}' has already been registered"
            exchange.respond(409, [JSON], wire.error_body(message))
            return
        if directory is None:
            raise invalid(f"failed to register '{path}', repository not found")
        directories[name] = directory
        try:
            await self._server.load(name)
        except BaseException as error:
            directories.pop(name, None)
            if isinstance(error, ConchError) and error.code is Code.UNAVAILABLE:
                # This status tells the platform to unload other models first.
                exchange.respond(507, [JSON], wire.error_body(error.public))
                return
            raise
        exchange.respond(200, [JSON])

    async def _unload(self, exchange: HttpExchange, name: str) -> None:
        await self._server.unload(name, dependents=True)
        self._server.repository.registered.pop(name, None)
        exchange.respond(200, [JSON])


def _model_in(path: Path) -> Path | None:
    """Return the model directory at ``path``: ``path`` itself, or its only subdirectory if that is the packed model."""
    try:
        directories = [entry for entry in path.iterdir() if entry.is_dir()]
        packed = len(directories) == 1 and not directories[0].name.isdigit() and not (path / CONFIG_FILE).exists()
    except OSError:
        return None
    return directories[0] if packed else path


def _shown(name: str, path: Path) -> dict[str, str]:
    return {"modelName": name, "modelUrl": str(path)}
