"""The backend ``openvino``: serves ``model.xml``, or a file in another format that OpenVINO reads, on the CPU.

Its instances are threads that share one compiled graph. ``CompiledGraph`` is also used by the engine ``openvino`` of
the Hugging Face backend.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array, Strings
from conch.backends.base.backend_base import versioned
from conch.backends.graphs.graph import Graph, GraphBackend
from conch.backends.graphs.signature import GraphTensor
from conch.config.parameters import Parameter, ParameterTable, parameter_texts
from conch.core.errors import ConchError, internal, unavailable, unsupported
from conch.machine import extras
from conch.machine.facts import usable_cores

#: Protocol datatypes by OpenVINO's element type.
DATATYPES: Final[dict[str, str]] = {
    "boolean": "BOOL", "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "u64": "UINT64", "i8": "INT8", "i16": "INT16",
    "i32": "INT32", "i64": "INT64", "f16": "FP16", "bf16": "BF16", "f32": "FP32", "f64": "FP64", "string": "BYTES",
}  # fmt: skip
_SOURCE_LOCATION: Final = re.compile(r"^\[[0-9:]+\] \S+:\d+: ")
#: Inference precision by ``precision``; for int8, the precision of the parts that are not quantized. By default,
#: OpenVINO runs those in bf16, which is no faster here, and with 2026.4 gives wrong results for sequences of 32 tokens.
_HINTS: Final = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "f32"}


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """Settings for a graph that ``instances`` threads run concurrently and that uses ``threads`` cores in total.

    ``precision`` is ``fp32``, ``fp16``, ``bf16`` or ``int8``. Any other value leaves the choice to OpenVINO, which uses
    bf16 if the CPU supports it. ``properties`` are OpenVINO properties that override the others.
    """

    threads: int = 1
    instances: int = 1
    precision: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)

    def compiled(self) -> dict[str, str]:
        """Return OpenVINO properties for compiling a model."""
        chosen = {
            "NUM_STREAMS": str(min(self.instances, self.threads)),
            "INFERENCE_NUM_THREADS": str(self.threads),
            # Pinned threads of two models, or of a model and the server, would wait for the same core.
            "ENABLE_CPU_PINNING": "NO",
        }
        if self.precision in _HINTS:
            chosen["INFERENCE_PRECISION_HINT"] = _HINTS[self.precision]
        return {**chosen, **self.properties}


class CompiledGraph(Graph):
    """A graph compiled by OpenVINO.

    The first run with new shapes takes about 15 ms longer, because OpenVINO creates kernels for them. Raises
    UNAVAILABLE if the file does not exist, UNSUPPORTED if openvino is not installed, and otherwise INTERNAL with
    OpenVINO's message.
    """

    def __init__(self, path: Path, settings: CompileSettings) -> None:
        openvino = self._openvino = extras.load("running OpenVINO models", "openvino")
        if not path.exists():
            raise unavailable(f"unable to find '{path}'")
        try:
            core = openvino.Core()
            self._compiled = core.compile_model(core.read_model(path), "CPU", settings.compiled())
        except Exception as error:
            raise runtime_error(error) from None
        # With several streams, a run on the calling thread would take cores from the streams. A synchronous run would
        # also copy texts twice.
        several = min(settings.instances, settings.threads) > 1
        self._elsewhere = several or any(_tensor(port).datatype == "BYTES" for port in self._compiled.outputs)
        self.inputs = tuple(map(_tensor, self._compiled.inputs))
        self.outputs = tuple(map(_tensor, self._compiled.outputs))
        self._at = {tensor.name: index for index, tensor in enumerate(self.inputs)}
        self._output_at = {tensor.name: index for index, tensor in enumerate(self.outputs)}
        self._of_bfloat16 = frozenset(tensor.name for tensor in self.inputs if tensor.datatype == "BF16")
        #: Free infer requests, the most recently used last; their number grows to that of concurrent callers.
        self._free: deque[Any] = deque()

    def infer(self, names: Sequence[str], values: Mapping[str, Array | Strings]) -> list[Array | Strings]:
        try:
            feeds = [(self._at[name], self._feed(name, value)) for name, value in values.items() if name in self._at]
            request = self._request()
            for index, tensor in feeds:
                request.set_input_tensor(index, tensor)
            if self._elsewhere:
                request.start_async()
                request.wait()
            else:
                # On this thread, because waking up another thread takes 150 µs.
                request.infer({}, share_outputs=True)
            results = [self._result(request, name) for name in names]
        except Exception as error:
            raise runtime_error(error) from None
        # Only after success: a failed request is not reused.
        self._free.append(request)
        return results

    def _request(self) -> Any:
        try:
            return self._free.pop()
        except IndexError:
            return self._compiled.create_infer_request()

    def _feed(self, name: str, value: Array | Strings) -> Any:
        """Return a tensor that shares the caller's memory, or a copy if OpenVINO cannot use that memory."""
        openvino = self._openvino
        if isinstance(value, Strings):
            texts = [element if isinstance(element, bytes) else element.encode() for element in value.elements]
            return openvino.Tensor(np.array(texts, np.bytes_).reshape(value.shape))
        if name in self._of_bfloat16:
            bits = np.ascontiguousarray(value, np.uint16)
            tensor = openvino.Tensor(openvino.Type.bf16, bits.shape)
            tensor.data.view(np.uint16)[...] = bits
            return tensor
        flags = value.flags
        array = value if flags.writeable and flags.c_contiguous else np.array(value, order="C")
        return openvino.Tensor(array, shared_memory=True)

    def _result(self, request: Any, name: str) -> Array | Strings:
        index = self._output_at[name]
        tensor = request.get_output_tensor(index)
        datatype = self.outputs[index].datatype
        if datatype == "BYTES":
            return Strings(tuple(tensor.shape), tensor.bytes_data.ravel().tolist())
        array: Array = tensor.data
        return array.view(np.uint16).copy() if datatype == "BF16" else array.copy()


def runtime_error(error: Exception) -> ConchError:
    """Convert an OpenVINO exception to an error with a one-line message."""
    if isinstance(error, ConchError):
        return error
    return internal(f"OpenVINO: {reason(error)}")


def reason(error: Exception) -> str:
    """Return the error message of OpenVINO or OpenVINO GenAI as one line, without source locations."""
    lines = [line.strip() for line in str(error).splitlines()]
    message = " ".join(line for line in lines if line and not line.startswith(("Exception from ", "Check '")))
    return _SOURCE_LOCATION.sub("", message) or type(error).__name__


def _tensor(port: Any) -> GraphTensor:
    # A port may have several names: those of the source graph, numbers assigned by the conversion, and the paths of
    # operations that it removed.
    names = sorted(port.get_names(), key=lambda name: (name.isdecimal(), "/" in name, name))
    datatype = port.element_type.get_type_name()
    shape = port.get_partial_shape()
    dims = [dim.get_length() if dim.is_static else -1 for dim in shape] if shape.rank.is_static else []
    return GraphTensor(names[0] if names else port.get_any_name(), DATATYPES.get(datatype, datatype), tuple(dims))


#: OpenVINO properties that Triton's OpenVINO backend accepts as parameters.
PARAMETERS: Final = ParameterTable(
    "openvino",
    (
        Parameter(
            "INFERENCE_PRECISION_HINT",
            "`f32`, `bf16`, `f16`",
            "`f32`",
            "precision for computing an fp32 graph",
        ),
        Parameter("INFERENCE_NUM_THREADS", "threads", "the usable cores", "cores shared by the instances"),
        Parameter("NUM_STREAMS", "streams", "one for each instance", "number of concurrent runs"),
        Parameter("PERFORMANCE_HINT", "`LATENCY`, `THROUGHPUT`", "none", "what OpenVINO optimises its settings for"),
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
                f"model '{self.model['name']}' is configured for a GPU, but backend 'openvino' runs only on CPUs: "
                "set instance_group kind KIND_CPU"
            )
        self.check_parameters(PARAMETERS)
        texts = parameter_texts(self.config)
        properties = {name: text for name, text in texts.items() if name in PARAMETERS.names}
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
