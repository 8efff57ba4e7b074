"""The backend ``onnxruntime``: the model is ``model.onnx``, a file or a folder with the weights beside it.

Its instances on one device are threads over one session.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conch.backends.graphs.graph import Graph, GraphBackend
from conch.backends.graphs.onnxruntime.parameters import PARAMETERS, session_settings
from conch.backends.graphs.onnxruntime.session import Session, SessionSettings, model_file
from conch.backends.native.libraries import versioned
from conch.backends.native.threads import usable_cores


class OnnxRuntimeBackend(GraphBackend):
    """One ONNX model on one device."""

    def model_file(self) -> Path:
        return model_file(self.model["version_directory"], self.model["filename"])

    def inspect(self, path: Path) -> Graph:
        # Weights are neither repacked nor folded.
        entries = {"session.disable_prepacking": "1"}
        return Session(path, SessionSettings(threads=1, graph="disable_all", entries=entries))

    def open(self, path: Path, instance: Mapping[str, Any]) -> Graph:
        self.check_parameters(PARAMETERS)
        settings = session_settings(
            self.config,
            self.backend_config,
            kind=instance["kind"],
            device_id=instance["device_id"],
            instances=instance["count"],
            cores=usable_cores(),
        )
        session = Session(path, settings)
        self.runs_with = {"engine": versioned("onnxruntime"), "providers": " ".join(session.providers)}
        if settings.threads:
            self.runs_with["threads"] = str(settings.threads)
        return session
