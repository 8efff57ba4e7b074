"""The console's static files, which ``make console`` builds into the folder ``static``."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Final

from conch.core.errors import Code, ConchError
from conch.frontends.http.exchange import HttpExchange

#: The page may only load what this server serves, and no page of another origin may embed it.
POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src blob:; "
    b"font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'"
)
_SECURITY: Final = (
    (b"Content-Security-Policy", POLICY),
    (b"X-Content-Type-Options", b"nosniff"),
    (b"Referrer-Policy", b"no-referrer"),
    (b"Cross-Origin-Opener-Policy", b"same-origin"),
    (b"Cross-Origin-Resource-Policy", b"same-origin"),
)
_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
#: The names of files stay the same when their content changes, so a browser revalidates them each time.
_CACHING: Final = (b"Cache-Control", b"no-cache")
_FOLDER: Final = "assets/"
_INDEX: Final = "index.html"


@dataclass(frozen=True, slots=True)
class _File:
    type: bytes
    plain: bytes
    compressed: bytes
    tag: bytes


class StaticFiles:
    """The files, read and compressed once, at the first request."""

    def __init__(self) -> None:
        self._files: Mapping[str, _File] | None = None

    def redirect(self, exchange: HttpExchange) -> None:
        """Handle ``GET /console``; the target is relative, so that it is right behind a proxy too."""
        exchange.respond(308, [(b"Location", b"console/"), *_SECURITY])

    def serve(self, exchange: HttpExchange, path: str) -> None:
        """Handle ``GET /console/<path>``; an empty path is the page."""
        if self._files is None:
            self._files = dict(_read())
        file = self._files.get(path or _INDEX)
        if file is None:
            raise ConchError("Not Found", Code.NOT_FOUND)
        headers = [
            (b"Content-Type", file.type), _CACHING, (b"ETag", file.tag),
            (b"Vary", b"Accept-Encoding"), *_SECURITY,
        ]  # fmt: skip
        if exchange.headers.get(b"if-none-match") == file.tag:
            exchange.respond(304, headers)
        elif b"gzip" in exchange.headers.get(b"accept-encoding", b""):
            exchange.respond(200, [*headers, (b"Content-Encoding", b"gzip")], file.compressed)
        else:
            exchange.respond(200, headers, file.plain)


def _read() -> list[tuple[str, _File]]:
    """Return the name and content of each file."""
    root = files(__package__).joinpath("static")
    entries = [(entry.name, entry) for entry in root.iterdir() if entry.is_file()]
    entries += [(_FOLDER + entry.name, entry) for entry in root.joinpath(_FOLDER).iterdir()]
    return [(name, _file(name, entry.read_bytes())) for name, entry in entries]


def _file(name: str, content: bytes) -> _File:
    kind = next((kind for suffix, kind in _TYPES.items() if name.endswith(suffix)), b"application/octet-stream")
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)  # with the header of gzip
    return _File(
        kind,
        content,
        compressor.compress(content) + compressor.flush(),
        b'"%b"' % sha256(content).hexdigest()[:16].encode(),
    )
