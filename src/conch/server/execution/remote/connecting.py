"""Creates the transports of a remote model, with credentials from files and the environment."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

from conch.client.connection import TlsContents, TlsFiles
from conch.config.remote import RemoteSettings, RemoteUrl
from conch.core.errors import invalid
from conch.server.execution.remote.http_calls import RemoteHttp
from conch.server.execution.remote.transport import Connect, RemoteModel, RemoteTransport


async def connecting(settings: RemoteSettings, directory: Path, *, decoupled: bool) -> Connect:
    """Return a function that creates transports to the servers of a model; files are read in a thread.

    Raises INVALID_ARG for unusable files, unset environment variables and invalid headers.
    """
    model = RemoteModel(
        settings.model,
        settings.version,
        settings.connect_timeout,
        decoupled,
        _headers(settings),
        await asyncio.to_thread(_read_tls, settings, directory),
    )
    return partial(_connect, model)


def _connect(model: RemoteModel, url: RemoteUrl) -> RemoteTransport:
    if not url.is_grpc:
        return RemoteHttp(url, model)
    from conch.server.execution.remote.grpc_calls import (
        RemoteGrpc,  # imports the gRPC library, which most servers do not need
    )

    return RemoteGrpc(url, model)


def _headers(settings: RemoteSettings) -> dict[str, str]:
    """The headers of each request; their values come from environment variables, never from the configuration."""
    headers: dict[str, str] = {}
    for line in _variable("headers_env", settings.headers_env).splitlines():
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise invalid(f"environment variable '{settings.headers_env}' must have 'name: value' on each line")
        headers[name.strip().lower()] = value.strip()
    authorization = _variable("authorization_env", settings.authorization_env).strip()
    if authorization:
        headers["authorization"] = authorization
    for name, value in headers.items():
        if not (name + value).isascii() or not (name + value).isprintable():
            raise invalid(f"header '{name}' from the environment has characters that no header can have")
    return headers


def _variable(parameter: str, name: str) -> str:
    if not name:
        return ""
    value = os.environ.get(name)
    if value is None:
        raise invalid(f"environment variable '{name}', which parameter '{parameter}' names, is not set")
    return value


def _read_tls(settings: RemoteSettings, directory: Path) -> TlsContents:
    """Read the files for encrypted connections; blocking."""
    names = (settings.ca_file, settings.certificate_file, settings.key_file)
    return TlsFiles(*(str(directory / name) if name else "" for name in names)).contents()
