"""Whom HTTP/2 connections work for: who makes sense of requests, who receives them, who keeps track.

Implemented by the service, by calls and by the front end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from conch.frontends.grpc.http2.headers import Field
from conch.tensors import Buffer

if TYPE_CHECKING:
    from conch.frontends.grpc.http2.connection import Connection
    from conch.frontends.grpc.http2.streams import Stream


class Http2Application(Protocol):
    """What a connection serves."""

    def parse(self, fields: Sequence[Field]) -> Any:
        """Header fields of a request as an immutable head; raises ``StreamFault`` for malformed ones."""

    def open(self, stream: Stream, head: Any) -> Receiver:
        """A request has begun."""


class ConnectionOwner(Protocol):
    """Who keeps track of connections."""

    def opened(self, connection: Connection) -> None:
        """The connection can be used; TLS is in place."""

    def gone(self, connection: Connection) -> None:
        """The connection has ended; called once for each that was opened."""


class Receiver(Protocol):
    """What a connection tells the owner of a stream, each on the event loop."""

    def data(self, chunk: Buffer) -> None:
        """Some bytes of the body; none only at its end, which ``stream.remote_ended`` tells."""

    def reset(self) -> None:
        """The stream is gone: reset by the client, or with its connection.  Nothing can be sent any more."""

    def drained(self) -> None:
        """Everything that was queued has been sent."""


class Nobody:
    """Receives what nobody wants."""

    def data(self, chunk: Buffer) -> None:
        pass

    def reset(self) -> None:
        pass

    def drained(self) -> None:
        pass


NOBODY: Final = Nobody()
