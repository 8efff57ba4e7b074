"""What a protocol has to do for a remote model, and how it says that a server could not be reached."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from conch.config.remote import RemoteUrl
from conch.config.schema import ModelConfig
from conch.errors import Code, ConchError
from conch.inference import InferRequest, InferResponse


class UnreachedError(ConchError):
    """No connection could be made, so that the server has seen nothing of the request."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Code.UNAVAILABLE)


class LostError(ConchError):
    """A connection broke before its request was answered; the server may have run it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Code.UNAVAILABLE)


class TlsContents(NamedTuple):
    """What the files for encrypted connections hold (PEM); None for the system's authorities, and for no certificate.

    ``context`` is made of them for HTTP, with the reason why not where they cannot be used.
    """

    authorities: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    context: ssl.SSLContext | None = None


_NO_TLS: Final = TlsContents()


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """The model on the other server: its ``name`` there, the ``version`` (-1 is any), and how long things may take (s).

    ``headers`` go with every request; their names are lower case.
    """

    name: str
    version: int = -1
    connect_timeout: float = 3.0
    decoupled: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: TlsContents = _NO_TLS


class RemoteTransport(Protocol):
    """Connections to one server, on the event loop.

    Methods raise :class:`UnreachedError`, :class:`LostError`, or what the server answers as a ConchError.
    ``on_broken`` is called when a connection has broken, which may mean that the server has gone.
    """

    on_broken: Callable[[], None]

    async def check(self) -> None:
        """Return if the model can be used; raises UNAVAILABLE with the reason why not."""

    async def config(self) -> ModelConfig:
        """The model's configuration, as the server shows it."""

    async def infer(
        self, request: InferRequest, seconds: float | None, deliver: Callable[[InferResponse], None]
    ) -> None:
        """Pass a request on, and its responses back, the last of which is final.  Cancelling gives the request up.

        Raises TimeoutError when ``seconds`` have passed.
        """

    async def close(self) -> None:
        """End all connections, and with them what is under way."""


#: Makes the transport to a server.
Connect = Callable[[RemoteUrl], RemoteTransport]
