"""Backends for tensors, started without a process."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from conch.backends.base.backend_base import BackendBase


class Log:
    """A channel that keeps what is logged."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def send(self, header: dict[str, Any], packer: object = None) -> None:
        self.lines.append((header["level"], header["message"]))


def initialise(
    kind: type[BackendBase],
    directory: Path,
    config: Mapping[str, Any] | None = None,
    *,
    filename: str = "",
    backend_config: Mapping[str, str] | None = None,
) -> Any:
    """A backend whose version directory is ``directory``; ``config`` is added to an empty configuration of model m."""
    model = {"name": "m", "version": "1", "directory": "", "version_directory": str(directory), "filename": filename}
    init = {
        "model": model,
        "config": json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": [], **(config or {})}),
        "log": {"info": True, "warning": True, "error": True},
        "backend_config": dict(backend_config or {}),
    }
    return kind(Log(), init)  # type: ignore[arg-type]


def start(backend: Any, config: str = "", *, kind: str = "CPU", count: int = 1) -> Any:
    """``backend``, loaded with ``config`` or what completing its own gives."""
    backend.start({"name": "m_0", "kind": kind, "device_id": 0, "count": count}, config or backend.complete())
    return backend


def tensor(name: str, data_type: str, *dims: int) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": list(dims)}


def parameters(**values: str) -> dict[str, Any]:
    return {name: {"string_value": value} for name, value in values.items()}


def sums_at_once(backend: Any, count: int) -> list[bool]:
    """Whether each of ``count`` threads that run the graph ``add_sub`` at once gets its own sums."""
    together = threading.Barrier(count)

    def run(number: int) -> bool:
        together.wait(timeout=60)
        a = np.full((3, 4), number, np.float32)
        return all(
            (backend.infer({"a": a, "b": a}, frozenset({"sum", "difference"}))["sum"] == 2 * number).all()
            for _ in range(50)
        )

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
