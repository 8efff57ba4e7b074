"""Keeps web pages of others from using the server through the browser of somebody who may.

A page can send requests to any address that its reader's browser reaches, with headers of which every browser sends
``Origin`` (or ``Sec-Fetch-Site``) with a POST, and which no page can leave out.  A content type that no form can have
is sent only after the server has agreed, which this one never does.  Where the server listens on this
machine alone, a page can also get its own name resolved to this machine (DNS rebinding), which shows in ``Host``.
Programs send neither another origin nor such a host.  Called by the router for each request, on the event loop; pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

from conch.errors import Code, ConchError
from conch.frontends.exposure import is_local

#: What browsers say of requests that the server's own pages, or the reader, have made.
_OWN: Final = (b"same-origin", b"none")
_HARMLESS: Final = (b"GET", b"HEAD")
#: Content types that a page may send anywhere (Fetch, "CORS-safelisted request-header"); none counts as one of them.
_OF_FORMS: Final = (b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain", b"")
#: Ends of names that the public DNS has not: those of this machine, of containers, of clusters and of local networks.
_PRIVATE: Final = (".localhost", ".internal", ".local")
#: How many hosts are remembered that may be named.
_REMEMBERED: Final = 256


class BrowserRules:
    """What requests of browsers may come from, and to: ``allowed`` names hosts besides the server's own, ``*`` all.

    ``address`` is where the server listens.
    """

    def __init__(self, address: str, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(host.lower() for host in allowed)
        self._everything = "*" in self._allowed
        self._checks_host = is_local(address) and not self._everything
        self._good_hosts: set[bytes] = set()

    def check(self, method: bytes, headers: dict[bytes, bytes]) -> ConchError | None:
        """The error that refuses a request, None for most."""
        host = headers.get(b"host", b"")
        if self._checks_host and host not in self._good_hosts and not self._may_be_named(host):
            return _refused(
                f"the host '{_shown(host)}' is none of this server's, which listens on this machine alone;"
                " allow it with --http-allowed-host"
            )
        if method in _HARMLESS or self._everything:
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

    def _may_be_named(self, host: bytes) -> bool:
        """Whether a request to this machine may have this ``Host``: no page elsewhere can have such a name."""
        name = _name(host)
        good = "." not in name or name.endswith(_PRIVATE) or _is_address(name) or name in self._allowed
        if good and len(self._good_hosts) < _REMEMBERED:
            self._good_hosts.add(host)
        return good


def _name(host: bytes) -> str:
    """The name of ``name:port``, in small letters."""
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
