"""HTTP/1.1 as a client speaks it: requests as bytes, and responses from bytes. Does no I/O.

A blocking socket drives it for ``conch.Client`` (:mod:`conch.client.connection`), an event loop for remote models and
for the senders of ``conch perf``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import httptools

from conch.core.errors import invalid

#: The number of JSON bytes before the binary tensors of a body.
JSON_SIZE: Final = "inference-header-content-length"
#: Characters that a target, and a header, cannot have.
#: Type and flags of the first HTTP/2 frame of a server, which follow its length of three bytes.
_SETTINGS: Final = b"\x04\x00"
_NO_TARGET: Final = re.compile(r"[^!-~]")
_NO_HEADER: Final = re.compile(r"[^\t -~\x80-\xff]")


class HttpFault(Exception):
    """The server sends something other than HTTP, or closes the connection before the end of its response."""


class HttpResponse(NamedTuple):
    """A complete response; the names of ``headers`` are in lower case."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    @property
    def json_size(self) -> int | None:
        """The number of JSON bytes in the body, before its binary tensors; None if all are JSON."""
        size = self.headers.get(JSON_SIZE.encode(), b"")
        return int(size) if size.isdigit() else None


def request_head(method: str, target: str, headers: Mapping[str, str], length: int | None = None) -> bytes:
    """Return the head of a request whose body has ``length`` bytes; None for a request without a body.

    Raises INVALID_ARG for characters that are not allowed in a head.
    """
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if length is not None:
        lines.append(f"content-length: {length}")
    wrong = next(filter(None, map(_NO_HEADER.search, lines)), None) or _NO_TARGET.search(target)
    if wrong is not None:
        raise invalid(f"{wrong[0]!r} is not allowed in an HTTP path or header")
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode("latin-1")


class ResponseReader:
    """Reads the responses of a connection, each after :meth:`begin`; interim responses (100 Continue) are skipped.

    ``status`` is 0 until the head is complete. ``keep_alive`` is whether the connection of a complete response can
    carry another request.
    """

    def __init__(self) -> None:
        self._fields: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        # The parser calls these, and the methods at the end of this class.
        self.on_header = self._fields.__setitem__
        self.on_body = self._body.append
        self._parser: Any = httptools.HttpResponseParser(self)
        self.begin()

    def begin(self) -> None:
        """Prepare for the response to the next request."""
        self.status = 0
        self.complete = False
        self.keep_alive = False
        self._fields.clear()
        self._body.clear()

    @property
    def headers(self) -> dict[bytes, bytes]:
        """The headers and trailers that have been read, with names in lower case."""
        return {name.lower(): value for name, value in self._fields.items()}

    def feed(self, data: bytes) -> bool:
        """Read the next bytes of the connection; return whether the response is complete. Raises HttpFault."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                is_http2 = not self.status and data[3:5] == _SETTINGS
                problem = (
                    f"is not HTTP: {error}" if not is_http2 else "is HTTP/2, so this is a gRPC port: use the HTTP port"
                )
                raise HttpFault(f"the response {problem}") from None
            self.keep_alive = False  # data after the response, or another protocol
        return self.complete

    def end(self) -> None:
        """Read the end of the connection, which ends a body of unknown length. Raises HttpFault if it comes early."""
        known = not self.headers.keys().isdisjoint((b"content-length", b"transfer-encoding"))
        if not self.status or (known and not self.complete):
            raise HttpFault(f"the server closed the connection {'in' if self.status else 'before'} its response")
        self.complete, self.keep_alive = True, False

    def take_body(self) -> bytes:
        """Return the body as far as it has been read and not been taken."""
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return body

    def response(self) -> HttpResponse:
        """Return the complete response."""
        return HttpResponse(self.status, self.headers, self.take_body())

    # Called by the parser

    def on_message_begin(self) -> None:
        if self.complete:
            raise HttpFault("the server sends a response without a request")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 or status == 101:  # Switching Protocols, which no client here requests
            self.status = status

    def on_message_complete(self) -> None:
        if self.status:
            self.complete = True
            self.keep_alive = self.status != 101 and self._parser.should_keep_alive()
        else:
            self._fields.clear()  # those of an interim response
