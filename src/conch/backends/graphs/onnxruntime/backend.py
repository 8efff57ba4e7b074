"""The backend ``onnxruntime``: the model is ``model.onnx``, a file or a folder with the weights beside it.

Its instances on one device are threads over one session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from conch.backends.graphs import signature
from conch.backends.graphs.onnxruntime.parameters import PARAMETERS, session_settings
from conch.backends.graphs.onnxruntime.session import Session, SessionSettings, model_file
from conch.backends.native.arrays import Array, Strings
from conch.backends.native.backend import TensorBackend
from conch.backends.native.threads import usable_cores
from conch.errors import unavailable


class OnnxRuntimeBackend(TensorBackend):
    """One ONNX model on one device."""

    _session: Session

    def complete(self) -> str:
        """The batch size, tensors and scheduler from the graph, unless inputs and outputs are given."""
        if self.config.get("input") and self.config.get("output"):
            name = self.model["name"]
            self.log(
                "INFO", f"skipping model configuration auto-complete for '{name}': inputs and outputs already specified"
            )
            return json.dumps(self.config)
        batch_size = signature.default_max_batch_size(self.backend_config)
        # Only to be looked at: its weights are neither repacked nor folded.
        opened = self._open(
            SessionSettings(threads=1, graph="disable_all", entries={"session.disable_prepacking": "1"})
        )
        completed = signature.complete(
            self.config, opened.inputs, opened.outputs, batch_size, lambda text: self.log("WARNING", text)
        )
        return json.dumps(completed)

    def load(self, instance: Mapping[str, Any]) -> None:
        self.check_parameters(PARAMETERS)
        session = self._open(
            session_settings(
                self.config,
                self.backend_config,
                kind=instance["kind"],
                device_id=instance["device_id"],
                instances=instance["count"],
                cores=usable_cores(),
            )
        )
        signature.check(self.config, session.inputs, session.outputs)
        self._session = session

    def infer(self, arrays: dict[str, Array | Strings], outputs: frozenset[str]) -> dict[str, Array | Strings]:
        names = [tensor.name for tensor in self._session.outputs if tensor.name in outputs]
        return dict(zip(names, self._session.infer(names, arrays), strict=True))

    def _open(self, settings: SessionSettings) -> Session:
        path = model_file(self.model["version_directory"], self.model["filename"])
        if not path.exists():
            raise unavailable(f"unable to find '{path}' for model '{self.model['name']}'")
        return Session(path, settings)
