"""Refuses requests from foreign web pages, and determines which pages may read responses (CORS)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from ipaddress import ip_address
from typing import Final

from conch.core.errors import Code, ConchError
from conch.frontends.listening import is_local

# A web page can send requests to any address that its reader's browser reaches. Browsers send ``Origin`` (or ``Sec-
# Fetch-Site``) with every POST, and a page cannot remove it. A content type that no form can have is sent only after
# the server has agreed in a preflight, which this one does only for --cors-origins. If the server listens on loopback
# only, a page can also resolve its own name to this machine (DNS rebinding), which shows in ``Host``. Programs send
# neither a foreign origin nor such a host. The router calls these rules for each request, on the event loop.


#: ``Sec-Fetch-Site`` values of requests made by the server's own pages or by the reader.
_OWN: Final = (b"same-origin", b"none")
_HARMLESS: Final = (b"GET", b"HEAD")
#: Content types that a page may send anywhere (Fetch, "CORS-safelisted request-header"); a missing one counts.
_OF_FORMS: Final = (b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain", b"")
#: Suffixes that the public DNS does not have: those of this machine, containers, clusters and local networks.
_PRIVATE: Final = (".localhost", ".internal", ".local")
#: Headers of responses that a page may read, in addition to those that any page may (Fetch, "CORS-safelisted").
_EXPOSED: Final = b"X-Request-Id, OpenAI-Processing-Ms, request-id, Retry-After, Inference-Header-Content-Length"
_HEADER_NAMES: Final = re.compile(rb"[A-Za-z0-9_, -]*")
#: Maximum number of allowed hosts remembered.
_REMEMBERED: Final = 256


class BrowserRules:
    """Checks the origin and host of browser requests: ``allowed`` has hosts beyond the server's, ``*`` for all.

    ``address`` is the address on which the server listens. Pages of ``origins`` may send any request and read the
    responses (CORS), without the browser's credentials such as cookies.
    """

    def __init__(self, address: str, allowed: Iterable[str], origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self._allowed = frozenset(host.lower() for host in allowed)
        self._everything = "*" in self._allowed
        self._checks_host = is_local(address) and not self._everything
        self._good_hosts: set[bytes] = set()

    def check(self, method: bytes, headers: dict[bytes, bytes]) -> ConchError | None:
        """Return the error that refuses a request, or None."""
        host = headers.get(b"host", b"")
        if self._checks_host and host not in self._good_hosts and not self._may_be_named(host):
            return _refused(
                f"the host '{_shown(host)}' does not belong to this server, which listens only on this machine;"
                " allow it with --http-allowed-host"
            )
        if method in _HARMLESS or self._everything or self._is_allowed(headers.get(b"origin")):
            return None
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if (origin is None and site is None) or site in _OWN:
            return None
        if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() not in _OF_FORMS:
            return None
        where = _name(origin.partition(b"://")[2]) if origin is not None else ""
        if where in self._allowed or (site is None and where and where == _name(host)):
            return None
        return _refused(
            f"requests of web pages of '{_shown(origin or b'another site')}' are not accepted;"
            " allow its host with --http-allowed-host"
        )

    def cors_headers(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response to a page that may read it; none for another client."""
        origin = headers.get(b"origin")
        if origin is None or not self._is_allowed(origin):
            return []
        shown = (
            [(b"Access-Control-Allow-Origin", b"*")]
            if b"*" in self._origins
            else [
                (b"Access-Control-Allow-Origin", origin),
                (b"Vary", b"Origin"),
            ]
        )
        return [*shown, (b"Access-Control-Expose-Headers", _EXPOSED)]

    def _is_allowed(self, origin: bytes | None) -> bool:
        return origin is not None and (origin in self._origins or b"*" in self._origins)

    def _may_be_named(self, host: bytes) -> bool:
        """Whether a request to this machine may have this ``Host``, that is, no page elsewhere can have that name."""
        name = _name(host)
        good = "." not in name or name.endswith(_PRIVATE) or _is_address(name) or name in self._allowed
        if good and len(self._good_hosts) < _REMEMBERED:
            self._good_hosts.add(host)
        return good


def preflight(method: bytes, headers: dict[bytes, bytes], methods: Collection[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the headers of the response to a preflight of an allowed page; none for another request.

    ``methods`` are those of the path. The page may send the headers that it requests.
    """
    if method != b"OPTIONS" or b"access-control-request-method" not in headers:
        return []
    requested = headers.get(b"access-control-request-headers", b"")
    return [
        (b"Access-Control-Allow-Methods", b", ".join(sorted(methods))),
        (b"Access-Control-Allow-Headers", requested if _HEADER_NAMES.fullmatch(requested) else b""),
        (b"Access-Control-Max-Age", b"600"),
    ]


def _name(host: bytes) -> str:
    """Return the name in ``name:port``, in lower case."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text.partition("]")[0][1:]
    return text.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _shown(value: bytes) -> str:
    return value[:200].decode("latin-1")


def _refused(message: str) -> ConchError:
    return ConchError(message, Code.INVALID_ARG)
