"""Locates the ``model.py`` of a model, or of its Python-based backend, and prepares what it imports, as Triton does.

Called once in a worker of its own, so that nothing a model does to its interpreter reaches another.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from conch.backends.python import pb_utils


def prepare(model: dict[str, Any]) -> None:
    """Let the model's files be found, and ``triton_python_backend_utils`` by its names.

    ``model`` is the part of the ``init`` frame about it; ``backend_directory`` is that of its Python-based backend.
    """
    backend = model.get("backend_directory")
    for directory in (backend,) if backend else (model["version_directory"], model["directory"]):
        if directory not in sys.path:
            sys.path.append(directory)
    sys.modules["triton_python_backend_utils"] = pb_utils
    sys.modules["c_python_backend_utils"] = pb_utils


def path(model: dict[str, Any]) -> str:
    backend = model.get("backend_directory")
    return f"{backend}/model.py" if backend else f"{model['version_directory']}/{model['filename'] or 'model.py'}"


def module_name(model: dict[str, Any]) -> str:
    """The name of the model's module: ``<version>.<file name>``, as ``1.model``; that of a backend is ``model``."""
    if model.get("backend_directory"):
        return "model"
    return f"{os.path.basename(model['version_directory'])}.{os.path.splitext(os.path.basename(path(model)))[0]}"
