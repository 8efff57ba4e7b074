"""TLS contexts of the ports, from ``--http-use-ssl``, ``--grpc-use-ssl`` and the options for their files.

Created once for each front end, before it listens.
"""

from __future__ import annotations

import ssl
from typing import Literal

from conch.core.errors import ConchError, invalid
from conch.options.settings import Settings


def make_context(settings: Settings, protocol: Literal["http", "grpc"]) -> ssl.SSLContext | None:
    """Return the TLS context of a protocol's port, None without TLS. Raises INVALID_ARG for unusable files."""
    use, mutual, certificate, key, root = (_http if protocol == "http" else _grpc)(settings)
    if not use and not mutual:
        return None
    if not certificate or not key:
        raise invalid(f"--{protocol}-use-ssl needs --{protocol}-server-cert and --{protocol}-server-key")
    if mutual and not root:
        raise invalid(f"--{protocol}-use-ssl-mutual needs --{protocol}-root-cert, with which clients are checked")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Required by HTTP/2 (RFC 9113, 9.2).
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"] if protocol == "grpc" else ["http/1.1"])
    try:
        # An empty password prevents a prompt: a server has no terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise _unusable(f"--{protocol}-server-cert {certificate} and --{protocol}-server-key {key}", error) from None
    if root:
        try:
            context.load_verify_locations(root)
        except (OSError, ssl.SSLError) as error:
            raise _unusable(f"--{protocol}-root-cert {root}", error) from None
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


_Flags = tuple[bool, bool, str, str, str]


def _http(settings: Settings) -> _Flags:
    use, mutual = settings.http_use_ssl, settings.http_use_ssl_mutual
    return use, mutual, settings.http_server_cert, settings.http_server_key, settings.http_root_cert


def _grpc(settings: Settings) -> _Flags:
    use, mutual = settings.grpc_use_ssl, settings.grpc_use_ssl_mutual
    return use, mutual, settings.grpc_server_cert, settings.grpc_server_key, settings.grpc_root_cert


def _unusable(files: str, error: OSError) -> ConchError:
    """Return the error for unusable files; OpenSSL's own messages have little detail."""
    why = error.strerror
    if isinstance(error, ssl.SSLError):
        why = error.reason.replace("_", " ").lower() if error.reason else "not PEM of that kind, or with a password"
    return invalid(f"{files} cannot be used: {why}")
