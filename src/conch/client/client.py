"""A client with the calls of ``conch.Server`` for a remote server, conch or Triton."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

from conch.client.connection import TlsFiles
from conch.client.deadline import Deadline
from conch.client.grpc import GrpcTransport
from conch.client.http import HttpTransport
from conch.client.requests import OutgoingRequest, version_number
from conch.client.results import InferResult
from conch.client.service import InferenceService, RequestTarget, ResultStream
from conch.client.transport import Transport
from conch.config import render
from conch.config.signature import signature as signature_of
from conch.core.errors import Code, ConchError, invalid
from conch.core.inference import ModelSignature

#: The time for which the inputs and outputs of a model are cached (s).
_SIGNATURE_SECONDS: Final = 2.0


class Client(InferenceService):
    """A server at ``url``: ``localhost:8001`` or ``grpc://…`` over gRPC, ``http://localhost:8000`` over HTTP.

    ``grpcs://`` and ``https://`` are encrypted. ``authorities`` is a file with the trusted certificates, in place of
    the system's; ``certificate`` and ``key`` are the client's own (PEM files). Any thread may call. The constructor
    raises INVALID_ARG for another kind of URL and for unusable files; calls raise UNAVAILABLE if the server cannot be
    reached.
    """

    def __init__(self, url: str, *, authorities: str = "", certificate: str = "", key: str = "") -> None:
        self._transport = _transport(url, TlsFiles(authorities, certificate, key))
        #: Signatures of models, and when they were requested (s, monotonic).
        self._signatures: dict[tuple[str, int], tuple[ModelSignature, float]] = {}

    def close(self) -> None:
        """Close the connections. Closing again does nothing."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def live(self, *, timeout: float | None = None) -> bool:
        deadline = Deadline.after(timeout)
        try:
            return self._transport.live(deadline)
        except ConchError as error:
            return _false_if_unreachable(error)

    def ready(self, model: str = "", version: int | str = "", *, timeout: float | None = None) -> bool:
        deadline = Deadline.after(timeout)
        try:
            return self._transport.ready(model, version_number(version), deadline)
        except ConchError as error:
            return _false_if_unreachable(error)

    def metadata(self, model: str = "", version: int | str = "", *, timeout: float | None = None) -> dict[str, Any]:
        return self._transport.metadata(model, version_number(version), Deadline.after(timeout))

    def config(self, model: str, version: int | str = "", *, timeout: float | None = None) -> dict[str, Any]:
        config = self._transport.config(model, version_number(version), Deadline.after(timeout))
        document: dict[str, Any] = json.loads(render.to_json(config))
        return document

    def statistics(
        self, model: str = "", version: int | str = "", *, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        return self._transport.statistics(model, version_number(version), Deadline.after(timeout))

    def models(self, *, timeout: float | None = None) -> list[dict[str, str]]:
        return self._transport.index(Deadline.after(timeout))

    def load(
        self,
        model: str,
        config: str | Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        deadline = Deadline.after(timeout)
        text = json.dumps(dict(config)) if isinstance(config, Mapping) else config
        self._transport.load(model, text, files or {}, deadline)

    def unload(self, model: str, dependents: bool = False, *, timeout: float | None = None) -> None:
        self._transport.unload(model, dependents, Deadline.after(timeout))

    def _signature(self, model: str, version: int, deadline: Deadline) -> ModelSignature:
        known = self._signatures.get((model, version))
        if known is not None and monotonic() - known[1] < _SIGNATURE_SECONDS:
            return known[0]
        signature = signature_of(self._transport.config(model, version, deadline), version)
        self._signatures[model, version] = signature, monotonic()
        return signature

    @contextmanager
    def _target(self, model: str, version: int, deadline: Deadline) -> Iterator[RequestTarget]:
        yield _RemoteModel(self._transport, self._signature(model, version, deadline), self._forget)

    def _forget(self, request: OutgoingRequest) -> None:
        """Discard the cached metadata of a model: after an error, the model may have changed."""
        self._signatures.pop((request.model, request.version), None)


class _RemoteModel(NamedTuple):
    """A model of the server reached through ``transport``."""

    transport: Transport
    signature: ModelSignature
    on_error: Callable[[OutgoingRequest], None]

    def infer(self, request: OutgoingRequest) -> InferResult:
        try:
            return self.transport.infer(request)
        except ConchError:
            self.on_error(request)
            raise

    def stream(self, request: OutgoingRequest) -> ResultStream:
        return self.transport.stream(request)


def _transport(url: str, files: TlsFiles) -> Transport:
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "grpc", url
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if scheme not in ("grpc", "grpcs", "http", "https") or not host:
        raise invalid(
            f"'{url}' is not the address of a server: use, for example, localhost:8001 for gRPC or http://localhost:8000"
        )
    tls = files if scheme in ("grpcs", "https") else None
    if tls is None and any(files):
        raise invalid(f"'{url}' is not encrypted, so certificates have no effect: use grpcs:// or https://")
    if scheme.startswith("grpc"):
        if parts.path.strip("/"):
            raise invalid(f"'{url}' has a path, but gRPC has none: use http://{rest} for HTTP")
        return GrpcTransport(host, port or 8001, tls)
    context = tls.context() if tls is not None else None
    return HttpTransport(host, port or (443 if tls is not None else 80), parts.path.rstrip("/"), context)


def _false_if_unreachable(error: ConchError) -> bool:
    if error.code is not Code.UNAVAILABLE:
        raise error
    return False
