"""The backend ``openvino``: the model is ``model.xml``, or another format that OpenVINO reads, on the CPU.

Its instances are threads over one compiled graph.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from conch.backends.graphs import signature
from conch.backends.graphs.openvino.compiled import CompiledGraph, CompileSettings
from conch.backends.native.arrays import Array, Strings
from conch.backends.native.backend import TensorBackend
from conch.backends.native.parameters import Parameter, ParameterTable
from conch.backends.native.threads import usable_cores
from conch.errors import unavailable, unsupported

#: OpenVINO's properties, as Triton's OpenVINO backend takes them.
PARAMETERS: Final = ParameterTable(
    "openvino",
    (
        Parameter("INFERENCE_PRECISION_HINT", "`f32`, `bf16`, `f16`", "`f32`", "what an fp32 graph is computed in"),
        Parameter("INFERENCE_NUM_THREADS", "threads", "the usable cores", "how many cores the instances share"),
        Parameter("NUM_STREAMS", "streams", "one for each instance", "how many runs are computed at once"),
        Parameter("PERFORMANCE_HINT", "`LATENCY`, `THROUGHPUT`", "none", "what OpenVINO chooses its settings for"),
        Parameter("ENABLE_CPU_PINNING", "`YES`, `NO`", "`NO`", "bind threads to cores"),
        Parameter("ENABLE_HYPER_THREADING", "`YES`, `NO`", "OpenVINO's", "use both threads of a core"),
        Parameter(
            "SCHEDULING_CORE_TYPE", "`ANY_CORE`, `PCORE_ONLY`, `ECORE_ONLY`", "OpenVINO's", "which kind of cores to use"
        ),
    ),
)


class OpenVinoBackend(TensorBackend):
    """One OpenVINO model."""

    _network: CompiledGraph

    def complete(self) -> str:
        """The batch size, tensors and scheduler from the graph, unless inputs and outputs are given."""
        if self.config.get("input") and self.config.get("output"):
            return json.dumps(self.config)
        batch_size = signature.default_max_batch_size(self.backend_config)
        opened = self._open(CompileSettings())
        completed = signature.complete(
            self.config, opened.inputs, opened.outputs, batch_size, lambda text: self.log("WARNING", text)
        )
        return json.dumps(completed)

    def load(self, instance: Mapping[str, Any]) -> None:
        if instance["kind"] == "GPU":
            raise unsupported(
                f"model '{self.model['name']}' is to run on a GPU, and backend 'openvino' runs on CPUs: "
                "set instance_group kind KIND_CPU"
            )
        self.check_parameters(PARAMETERS)
        properties = {
            name: one.get("string_value", "")
            for name, one in self.config.get("parameters", {}).items()
            if name in PARAMETERS.names
        }
        network = self._open(
            CompileSettings(
                threads=usable_cores(), instances=instance["count"], precision="fp32", properties=properties
            )
        )
        signature.check(self.config, network.inputs, network.outputs)
        self._network = network

    def infer(self, arrays: dict[str, Array | Strings], outputs: frozenset[str]) -> dict[str, Array | Strings]:
        names = [tensor.name for tensor in self._network.outputs if tensor.name in outputs]
        return dict(zip(names, self._network.infer(names, arrays), strict=True))

    def _open(self, settings: CompileSettings) -> CompiledGraph:
        path = Path(self.model["version_directory"]) / (self.model["filename"] or "model.xml")
        if path.is_dir():
            path /= path.name  # model.onnx/model.onnx, with its weights beside it
        if not path.exists():
            raise unavailable(f"unable to find '{path}' for model '{self.model['name']}'")
        return CompiledGraph(path, settings)
