"""The transport interface of remote models, and its errors for unreachable servers and lost connections."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from conch.config.remote import RemoteUrl
from conch.config.schema import ModelConfig
from conch.core.errors import Code, ConchError
from conch.core.inference import InferRequest, InferResponse


class UnreachedError(ConchError):
    """No connection could be made; the server has not received the request."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Code.UNAVAILABLE)


class LostError(ConchError):
    """A connection broke before the response; the server may have run the request."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Code.UNAVAILABLE)


class TlsContents(NamedTuple):
    """The contents of the files for encrypted connections (PEM), and the SSL context made from them for HTTP.

    ``authorities`` None means the system's authorities; ``certificate`` and ``key`` None mean no client certificate.
    """

    authorities: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    context: ssl.SSLContext | None = None


_NO_TLS: Final = TlsContents()


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """The model on another server: its ``name`` and ``version`` there (-1 is any), and how to connect.

    ``connect_timeout`` is in seconds. ``headers`` are sent with each request; their names are lower case.
    """

    name: str
    version: int = -1
    connect_timeout: float = 3.0
    decoupled: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: TlsContents = _NO_TLS


class RemoteTransport(Protocol):
    """Connections to one server, on the event loop.

    Methods raise :class:`UnreachedError`, :class:`LostError`, or the server's error as a ConchError. ``on_broken`` is
    called when a connection has broken, because the server may be gone.
    """

    on_broken: Callable[[], None]

    async def check(self) -> None:
        """Return if the model is ready; otherwise raise UNAVAILABLE with the reason."""

    async def config(self) -> ModelConfig:
        """The model's configuration on the server."""

    async def infer(
        self, request: InferRequest, seconds: float | None, deliver: Callable[[InferResponse], None]
    ) -> None:
        """Send a request and pass its responses to ``deliver``; the last one is final. Cancelling cancels the request.

        Raises TimeoutError after ``seconds``.
        """

    async def close(self) -> None:
        """Close all connections; in-flight requests end with them."""


#: Creates the transport to a server.
Connect = Callable[[RemoteUrl], RemoteTransport]
