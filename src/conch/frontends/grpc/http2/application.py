"""The interface between HTTP/2 connections and what they serve; implemented by the gRPC service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from conch.frontends.grpc.http2.headers import Field
from conch.frontends.grpc.http2.streams import Http2Stream, StreamHandler


class Http2Application(Protocol):
    """Serves the requests of connections; called on the event loop."""

    def parse(self, fields: Sequence[Field]) -> Any:
        """The head of a request, immutable and of the application's own type, from its header fields.

        Raises ``StreamFault`` for malformed fields.
        """

    def check_trailers(self, fields: Sequence[Field]) -> None:
        """Raises ``StreamFault`` for fields that may not end a request."""

    def open(self, stream: Http2Stream, head: Any) -> StreamHandler:
        """Begin to serve a request; returns the handler of what arrives for it."""
