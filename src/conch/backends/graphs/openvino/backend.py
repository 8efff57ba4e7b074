"""The backend ``openvino``: serves ``model.xml``, or a file in another format that OpenVINO reads, on the CPU.

Its instances are threads that share one compiled graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from conch.backends.base.libraries import versioned
from conch.backends.graphs.graph import Graph, GraphBackend
from conch.backends.graphs.openvino.compiled import CompiledGraph, CompileSettings
from conch.config.parameters import Parameter, ParameterTable
from conch.core.errors import unsupported
from conch.machine.cores import usable_cores

#: OpenVINO properties that Triton's OpenVINO backend accepts as parameters.
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


class OpenVinoBackend(GraphBackend):
    """One OpenVINO model."""

    def model_file(self) -> Path:
        path = Path(self.model["version_directory"]) / (self.model["filename"] or "model.xml")
        return path / path.name if path.is_dir() else path  # model.onnx/model.onnx, next to its weights

    def inspect(self, path: Path) -> Graph:
        return CompiledGraph(path, CompileSettings())

    def open(self, path: Path, instance: Mapping[str, Any]) -> Graph:
        if instance["kind"] == "GPU":
            raise unsupported(
                f"model '{self.model['name']}' is to run on a GPU, and backend 'openvino' runs on CPUs: "
                "set instance_group kind KIND_CPU"
            )
        self.check_parameters(PARAMETERS)
        properties = {
            name: parameter.get("string_value", "")
            for name, parameter in self.config.get("parameters", {}).items()
            if name in PARAMETERS.names
        }
        settings = CompileSettings(
            threads=usable_cores(), instances=instance["count"], precision="fp32", properties=properties
        )
        graph = CompiledGraph(path, settings)
        chosen = settings.compiled()
        self.runtime_facts = {
            "engine": versioned("openvino"),
            "precision": chosen["INFERENCE_PRECISION_HINT"],
            "threads": chosen["INFERENCE_NUM_THREADS"],
            "streams": chosen["NUM_STREAMS"],
        }
        return graph
