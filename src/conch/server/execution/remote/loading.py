"""Loads a remote model: completes its configuration from its servers, and creates its executor and transports.

The credentials of transports come from files and from the environment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from functools import partial
from pathlib import Path
from typing import Final

from conch.client.connection import TlsContents, TlsFiles
from conch.config import render
from conch.config.complete import normalise
from conch.config.remote import RemoteSettings, RemoteUrl, read_remote, take_over
from conch.config.schema import ModelConfig, copied, scheduler
from conch.core.errors import ConchError, invalid, unavailable
from conch.server.execution.remote.executor import RemoteExecutor, RemoteSequences
from conch.server.execution.remote.http_calls import RemoteHttp
from conch.server.execution.remote.transport import Connect, RemoteModel, RemoteTransport
from conch.telemetry.statistics import ModelStatistics
from conch.workers.child.packing import OutputWatch

LOG = logging.getLogger("conch")

#: Default idle time after which a sequence is no longer pinned to its server (s).
_IDLE_SECONDS: Final = 600.0


async def complete_remote(config: ModelConfig, directory: Path) -> ModelConfig:
    """Complete ``config`` with the configuration on a server of the model; unchanged if it has inputs or outputs.

    Raises UNAVAILABLE if no server returns its configuration.
    """
    settings = read_remote(config).of_version(-1)
    if config.input or config.output:
        return config
    asker = RemoteExecutor(
        config.name,
        settings,
        await connecting(settings, directory, decoupled=False),
        ModelStatistics(config.name, 0),
        decoupled=False,
        limit=0,
        idle_seconds=_IDLE_SECONDS,
    )
    try:
        await asker.start()
        theirs = await asker.config()
    except ConchError as error:
        raise unavailable(
            f"the configuration of remote model '{config.name}' cannot be completed: {error.message}. With input and "
            "output written in its configuration it loads while its server is away"
        ) from None
    finally:
        await asker.stop(0)
    return _merged(config, theirs)


def _merged(config: ModelConfig, theirs: ModelConfig) -> ModelConfig:
    completed = copied(config)
    take_over(completed, theirs)
    normalise(completed)
    read_remote(completed)  # the decoupled property is known only now: check that the addresses support it
    return completed


async def make_executor(
    config: ModelConfig,
    version: int,
    directory: Path,
    statistics: ModelStatistics,
    limit: int,
    key: str,
    sequences: RemoteSequences,
) -> RemoteExecutor:
    """Create and start the executor of a model version with a completed configuration.

    ``limit`` is the maximum number of in-flight requests; for ``key`` and ``sequences`` see :class:`RemoteExecutor`.
    """
    settings = read_remote(config).of_version(version)
    decoupled = config.model_transaction_policy.decoupled
    idle = _IDLE_SECONDS
    if scheduler(config) == "sequence_batching":
        idle = config.sequence_batching.max_sequence_idle_microseconds / 1e6
    watch = OutputWatch(config.name, lambda message: LOG.warning("%s", message))
    watch.declare(json.loads(render.to_json(config)))
    executor = RemoteExecutor(
        config.name,
        settings,
        await connecting(settings, directory, decoupled=decoupled),
        statistics,
        decoupled=decoupled,
        limit=limit,
        idle_seconds=idle,
        key=key,
        sequences=sequences,
        watch=watch,
    )
    try:
        await executor.start()
    except BaseException:
        await executor.stop(0)
        raise
    return executor


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
    from conch.server.execution.remote.grpc_calls import RemoteGrpc  # imports gRPC, which most servers do not need

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
