"""Opens the ports of the front ends: TLS contexts from the options, and warnings about ports that others can reach."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from math import inf
from typing import Final, Literal

from conch.core.errors import ConchError, internal, invalid
from conch.options.settings import Settings

_BACKLOG: Final = 1024
#: Maximum duration of a TLS handshake (s).
_LONGEST_HANDSHAKE: Final = 60.0


class PortTakenError(ConchError):
    """INTERNAL: ``port`` is already in use; the message is Triton's, with a trailing space."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"Socket '{host}:{port}' already in use ")
        self.port = port


async def listen(
    factory: Callable[[], asyncio.Protocol],
    host: str,
    port: int,
    *,
    reuse_port: bool = False,
    tls: ssl.SSLContext | None = None,
    handshake_seconds: float = inf,
) -> tuple[asyncio.Server, tuple[str, int]]:
    """Listen on ``host:port`` (port 0: any free port); returns the server and its address.

    ``factory`` creates the protocol of each connection; with ``tls``, after its handshake, which may take
    ``handshake_seconds``. Raises PortTakenError, or INTERNAL for any other failure.
    """
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(
            factory,
            host,
            port,
            ssl=tls,
            backlog=_BACKLOG,
            reuse_port=reuse_port or None,
            ssl_handshake_timeout=min(handshake_seconds, _LONGEST_HANDSHAKE) if tls is not None else None,
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(host, port) from error
        raise internal(f"{host}:{port}: {error}") from error
    address: tuple[str, int] = server.sockets[0].getsockname()[:2]
    return server, address


def make_context(settings: Settings, protocol: Literal["http", "grpc"]) -> ssl.SSLContext | None:
    """Return the TLS context of a protocol's port, None without TLS. Raises INVALID_ARG for unusable files."""
    use, mutual, certificate, key, root = (_http_files if protocol == "http" else _grpc_files)(settings)
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


def _http_files(settings: Settings) -> _Flags:
    use, mutual = settings.http_use_ssl, settings.http_use_ssl_mutual
    return use, mutual, settings.http_server_cert, settings.http_server_key, settings.http_root_cert


def _grpc_files(settings: Settings) -> _Flags:
    use, mutual = settings.grpc_use_ssl, settings.grpc_use_ssl_mutual
    return use, mutual, settings.grpc_server_cert, settings.grpc_server_key, settings.grpc_root_cert


def _unusable(files: str, error: OSError) -> ConchError:
    """Return the error for unusable files; OpenSSL's own messages have little detail."""
    why = error.strerror
    if isinstance(error, ssl.SSLError):
        why = error.reason.replace("_", " ").lower() if error.reason else "not PEM of that kind, or with a password"
    return invalid(f"{files} cannot be used: {why}")


_CONTROL: Final = "model-repository"


def exposure_warnings(settings: Settings) -> Iterator[str]:
    """Yield a warning for each front end over which remote clients may load models with their own files."""
    if settings.model_control_mode != "explicit" or settings.model_load_overrides != "files":
        return
    http = settings.http_restricted_api, "http-restricted-api"
    grpc = settings.grpc_restricted_protocol, "grpc-restricted-protocol"
    rows = (("HTTP", "http", *http), ("gRPC", "grpc", *grpc),
            ("Vertex AI", "vertex-ai", *http), ("OCI Data Science", "oci", *http))  # fmt: skip
    for title, name, restrictions, flag in rows:
        listener = settings.listeners[name]
        restricted = any(_CONTROL in restriction.apis for restriction in restrictions)
        if listener.allowed and not is_local(listener.address) and not restricted:
            yield (
                f"{title} clients at {listener.address} can run code on this machine: with "
                "--model-control-mode=explicit a client may load a model with its own files; set "
                f"--model-load-overrides=none, or --{flag}={_CONTROL}:<header>=<secret>"
            )


def is_local(address: str) -> bool:
    """Whether ``address`` is reachable from this machine only."""
    try:
        return ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address.lower() == "localhost"
