"""TLS of the gRPC port: ``--grpc-use-ssl`` and the options for its files.

Called once, before the front end listens.
"""

from __future__ import annotations

import ssl

from conch.errors import invalid
from conch.settings import Settings


def make_context(settings: Settings) -> ssl.SSLContext | None:
    """The TLS context of the port, None without TLS.  Raises INVALID_ARG for files that cannot be used."""
    if not settings.grpc_use_ssl and not settings.grpc_use_ssl_mutual:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # What HTTP/2 asks for (RFC 9113, 9.2).
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(settings.grpc_server_cert, settings.grpc_server_key)
        if settings.grpc_root_cert:
            context.load_verify_locations(settings.grpc_root_cert)
    except (OSError, ssl.SSLError) as error:
        raise invalid(f"failed to load the gRPC server's certificate, key or root certificate: {error}") from error
    if settings.grpc_use_ssl_mutual:
        context.verify_mode = ssl.CERT_REQUIRED
    return context
