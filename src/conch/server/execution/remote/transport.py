"""The transport interface of remote models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from conch.client.connection import TlsContents
from conch.config.remote import RemoteUrl
from conch.config.schema import ModelConfig
from conch.core.inference import InferRequest, InferResponse

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

    Methods raise UnreachableError or LostError (:mod:`conch.client.transport`), or the server's error as a ConchError.
    ``on_broken`` is called when a connection has broken, because the server may be gone.
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
