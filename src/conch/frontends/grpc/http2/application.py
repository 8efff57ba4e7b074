"""The interface between HTTP/2 connections and their application, which the gRPC service implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from conch.frontends.grpc.http2.headers import Field
from conch.frontends.grpc.http2.streams import Http2Stream, StreamHandler


class Http2Application(Protocol):
    """Serves the requests of connections, on the event loop."""

    def parse(self, fields: Sequence[Field]) -> Any:
        """Parse the header fields of a request into an immutable head of the application's own type.

        Raises ``StreamFault`` for malformed fields.
        """

    def check_trailers(self, fields: Sequence[Field]) -> None:
        """Raise ``StreamFault`` for fields that may not end a request."""

    def open(self, stream: Http2Stream, head: Any) -> StreamHandler:
        """Begin to serve a request; returns the handler of its stream."""
