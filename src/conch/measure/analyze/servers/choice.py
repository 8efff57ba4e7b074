"""Opens the server and the model repository of an analysis, as selected by the settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from conch.core.errors import invalid
from conch.measure.analyze.options.settings import AnalyzeSettings
from conch.measure.analyze.servers.base import AnalyzedServer, ControlClient
from conch.measure.analyze.servers.local import LocalServer
from conch.measure.analyze.servers.remote import RemoteServer
from conch.measure.perf.plan import read_address
from conch.repository.scan import ModelRepository

#: The name of the server's log, in the directory of the reports.
LOG: Final = "server.log"


def open_server(settings: AnalyzeSettings, repository: ModelRepository | None, models: Sequence[str]) -> AnalyzedServer:
    """Return the server of ``triton_launch_mode``, with ``models`` and their ensemble steps.

    Raises INVALID_ARG for settings that do not define a server.
    """
    if settings.triton_launch_mode == "local":
        if repository is None:
            raise invalid("model_repository: give the models' folder (-m), or a running server (--mode remote)")
        settings.export_path.mkdir(parents=True, exist_ok=True)
        environment = {name: str(value) for name, value in settings.triton_server_environment.items()}
        return LocalServer(
            repository, models, settings.export_path / LOG,
            protocol=settings.client_protocol, flags=_flags(settings), environment=environment,
            timeout=settings.perf_analyzer_timeout,
        )  # fmt: skip
    grpc = settings.client_protocol == "grpc"
    endpoint = settings.triton_grpc_endpoint if grpc else settings.triton_http_endpoint
    address, path = read_address(endpoint, settings.client_protocol)
    if path:
        raise invalid(f"triton_http_endpoint: {endpoint} has a path, but requests are sent to host:port")
    timeout = settings.perf_analyzer_timeout
    control = ControlClient(address, timeout, grpc=grpc)
    return RemoteServer(control, address, models, reload=not settings.reload_model_disable)


def _flags(settings: AnalyzeSettings) -> list[str]:
    """Return the additional flags of ``conch serve``; flags that the analysis sets itself are refused."""
    flags = []
    for name, value in settings.triton_server_flags.items():
        flag = name.lstrip("-").replace("_", "-")
        if flag.endswith(("-port", "-address")) or flag in ("model-repository", "model-control-mode", "load-model"):
            raise invalid(f"triton_server_flags: {name} is set by the analysis")
        flags.append(f"--{flag}={str(value).lower() if isinstance(value, bool) else value}")
    return flags


def repository_of(settings: AnalyzeSettings) -> ModelRepository | None:
    """Return the user's repository, or None for a remote server; raises INVALID_ARG for a directory without models."""
    if settings.model_repository is None:
        return None
    return ModelRepository([Path(os.path.abspath(settings.model_repository))])
