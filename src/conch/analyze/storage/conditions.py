"""The conditions of measurements besides the candidate: machine, conch version, way of measuring, and models' files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from conch import __version__
from conch.analyze.options.settings import AnalyzeSettings
from conch.errors import ConchError
from conch.machine.facts import MachineFacts
from conch.perf.inputs.data import DataOptions
from conch.repository.scan import ModelRepository

#: The settings that affect points; goals and the search mode do not.
_MEASURING = (
    "triton_launch_mode", "triton_http_endpoint", "triton_grpc_endpoint", "triton_server_flags",
    "triton_server_environment", "client_protocol", "perf_analyzer_flags", "batch_sizes",
)  # fmt: skip


def conditions(
    settings: AnalyzeSettings, repository: ModelRepository | None, configs: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, str]:
    """Return the conditions by name for the journal; ``configs`` are the completed ones of the repository."""
    names = [name for name in _MEASURING if settings.triton_launch_mode == "remote" or not name.endswith("_endpoint")]
    measuring = {name: getattr(settings, name) for name in names}
    measuring["default data"] = DataOptions().source
    if settings.budget is not None:
        measuring["budget"] = settings.budget  # a budget shortens windows
    measuring["loads"] = "rates" if settings.loads_are_rates else "callers"
    by_name = {
        "machine": str(MachineFacts.read()),
        "conch": __version__,
        "measuring": json.dumps(measuring, sort_keys=True, default=str),
    }
    for model, config in configs.items():
        own = settings.model(model)
        model_options = {
            "perf_flags": own.perf_flags, "batch_sizes": own.batch_sizes, "rates": bool(own.request_rate),
            "config": config,
        }  # fmt: skip
        by_name[f"model {model}"] = _digest([_files(repository, model), model_options])
    return by_name


def _files(repository: ModelRepository | None, model: str) -> Any:
    """Return times and sizes of a model's files; None if they are on another machine."""
    if repository is None:
        return None
    try:
        stamps = repository.fingerprint(model)
    except (ConchError, OSError):
        return None
    versions = {str(version): sorted(files) for version, files in stamps.versions.items()}
    return [sorted(stamps.config), versions, sorted(stamps.rest)]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
