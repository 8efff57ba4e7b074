"""An ONNX graph in ONNX Runtime: opening it, its tensors, and running it.

Used by the backend ``onnxruntime`` and by the Hugging Face backend's engine of that name, in workers, and by
``conch convert``.  A session may run in several threads at once.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch import extras
from conch.backends.base.arrays import Array, Strings
from conch.backends.graphs.graph import Graph
from conch.backends.graphs.signature import GraphTensor
from conch.errors import ConchError, internal, invalid, unavailable, unsupported

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"
TENSORRT: Final = "TensorrtExecutionProvider"
OPENVINO: Final = "OpenVINOExecutionProvider"
#: The package of PyPI whose ONNX Runtime has the provider.
_PACKAGES: Final = {CUDA: "onnxruntime-gpu", TENSORRT: "onnxruntime-gpu", OPENVINO: "onnxruntime-openvino"}

#: Protocol names of the types that ONNX Runtime calls ``tensor(...)``.
DATATYPES: Final[dict[str, str]] = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "bfloat16": "BF16", "float": "FP32",
    "double": "FP64", "string": "BYTES",
}  # fmt: skip
_BFLOAT16: Final = 16  # onnx.TensorProto.BFLOAT16
_ERROR: Final = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The settings with which a graph is opened and run.

    ``threads`` is the size of the intra-op pool, the caller of a run included, and 0 ONNX Runtime's choice.  ``graph``
    is the optimisation level: ``all``, ``extended``, ``basic`` or ``disable_all``.  ``entries`` are session options by
    key, ``run_entries`` those of each run, ``providers`` the execution providers with their options, best first.
    """

    threads: int = 0
    inter_op_threads: int = 0
    parallel: bool = False
    graph: str = "all"
    memory_arena: bool = True
    memory_pattern: bool = True
    entries: Mapping[str, str] = field(default_factory=dict)
    run_entries: Mapping[str, str] = field(default_factory=dict)
    providers: Sequence[tuple[str, Mapping[str, str]]] = ((CPU, {}),)


class Session(Graph):
    """An open ONNX graph.

    Raises UNAVAILABLE for a file that is not there, UNSUPPORTED without what it needs, INTERNAL with ONNX Runtime's
    words otherwise.
    """

    def __init__(self, path: Path, settings: SessionSettings) -> None:
        runtime = self._runtime = extras.load("running ONNX models", "onnxruntime")
        if not path.exists():
            raise unavailable(f"unable to find '{path}'")
        missing = [name for name, _ in settings.providers if name not in runtime.get_available_providers()]
        if missing:
            raise unsupported(
                f"'{path.name}' is to run with {missing[0]}, which the installed onnxruntime does not have: install "
                f"{_PACKAGES.get(missing[0], 'one that does')}, or run it on the CPU (instance_group kind KIND_CPU)"
            )
        try:
            self._session = runtime.InferenceSession(
                str(path), _options(runtime, settings), providers=[(name, dict(of)) for name, of in settings.providers]
            )
        except Exception as error:
            raise runtime_error(error) from None
        self.inputs = tuple(map(_tensor, self._session.get_inputs()))
        self.outputs = tuple(map(_tensor, self._session.get_outputs()))
        self.initializers = tuple(map(_tensor, self._session.get_overridable_initializers()))
        self.providers: tuple[str, ...] = tuple(self._session.get_providers())
        self._run_options = _run_options(runtime, settings)
        takes = (*self.inputs, *self.initializers)
        self._bfloat16_in = frozenset(tensor.name for tensor in takes if tensor.datatype == "BF16")
        self._bfloat16_out = any(tensor.datatype == "BF16" for tensor in self.outputs)
        self._strings = any(tensor.datatype == "BYTES" for tensor in (*takes, *self.outputs))
        if self._bfloat16_out and self._strings:
            # One way of running gives BF16, the other takes strings.
            raise unsupported(f"'{path.name}' has BF16 outputs and strings, which cannot be run together")

    def run(self, names: Sequence[str], arrays: Mapping[str, Array]) -> list[Array]:
        """Run once, for the outputs ``names``; for graphs whose types numpy has."""
        try:
            # With numpy arrays both ways: 5 us of overhead, where an io_binding made anew takes 10 and OrtValues 40.
            return self._session.run(names, arrays, self._run_options)  # type: ignore[no-any-return]
        except Exception as error:
            raise runtime_error(error) from None

    def infer(self, names: Sequence[str], values: Mapping[str, Array | Strings]) -> list[Array | Strings]:
        if not (self._bfloat16_in or self._bfloat16_out or self._strings):
            return [*self.run(names, values)]  # type: ignore[arg-type]
        feeds = {name: self._feed(name, value) for name, value in values.items()}
        if not self._bfloat16_out:
            return [_with_strings(array) for array in self.run(names, feeds)]
        of_numpy = self._runtime.OrtValue.ortvalue_from_numpy
        feeds = {name: of_numpy(feed) if isinstance(feed, np.ndarray) else feed for name, feed in feeds.items()}
        try:
            return [
                _bits(run_with_ort_value)
                for run_with_ort_value in self._session.run_with_ort_values(names, feeds, self._run_options)
            ]
        except Exception as error:
            raise runtime_error(error) from None

    def _feed(self, name: str, value: Array | Strings) -> Any:
        """A numpy array, or an OrtValue of what numpy has no type for."""
        if isinstance(value, Strings):
            return _texts(name, value)
        if name not in self._bfloat16_in:
            return np.ascontiguousarray(value).reshape(value.shape)
        bits = np.ascontiguousarray(value, np.uint16)
        return self._runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _BFLOAT16)


def runtime_error(error: Exception) -> ConchError:
    """An error with the text that Triton reports for an exception of ONNX Runtime's."""
    if isinstance(error, ConchError):
        return error
    found = _ERROR.match(str(error))
    return internal(f"onnx runtime error {found[1]}: {found[2].strip()}" if found else f"onnx runtime error: {error}")


def model_file(version_directory: str | Path, filename: str) -> Path:
    """The graph's file: ``filename``, or ``model.onnx`` in a folder of that name, with its weights beside it."""
    path = Path(version_directory) / (filename or "model.onnx")
    return path / "model.onnx" if path.is_dir() else path


def _options(runtime: Any, settings: SessionSettings) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what is wrong is raised
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = settings.inter_op_threads
    options.execution_mode = getattr(runtime.ExecutionMode, "ORT_PARALLEL" if settings.parallel else "ORT_SEQUENTIAL")
    options.graph_optimization_level = getattr(
        runtime.GraphOptimizationLevel,
        f"ORT_{'' if settings.graph == 'disable_all' else 'ENABLE_'}{settings.graph}".upper(),
    )
    options.enable_cpu_mem_arena = settings.memory_arena
    options.enable_mem_pattern = settings.memory_pattern
    # The pool's threads spin while something runs, which saves a third of a short run, but not after it: they would
    # take the cores from the threads that receive, tokenise and send.
    entries = {"session.force_spinning_stop": "1", **settings.entries}
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


def _run_options(runtime: Any, settings: SessionSettings) -> Any:
    if not settings.run_entries:
        return None
    options = runtime.RunOptions()
    for key, value in settings.run_entries.items():
        options.add_run_config_entry(key, value)
    return options


def _tensor(described: Any) -> GraphTensor:
    known = re.fullmatch(r"tensor\((\w+)\)", described.type)
    datatype = DATATYPES.get(known[1], described.type) if known else described.type
    shape = described.shape if known else ()
    return GraphTensor(described.name, datatype, tuple(dim if isinstance(dim, int) else -1 for dim in shape))


def _texts(name: str, value: Strings) -> Array:
    texts = np.empty(len(value.elements), object)
    for index, element in enumerate(value.elements):
        try:
            texts[index] = element.decode() if isinstance(element, bytes) else element
        except UnicodeDecodeError as error:
            raise invalid(f"input '{name}' is not valid UTF-8: element {index}, byte {error.start}") from None
    return texts.reshape(value.shape)


def _with_strings(array: Array) -> Array | Strings:
    return Strings(array.shape, array.ravel().tolist()) if array.dtype == object else array


def _bits(value: Any) -> Array:
    """An OrtValue as a numpy array, BF16 as its bits."""
    if value.element_type() != _BFLOAT16:
        array: Array = value.numpy()
        return array
    size = value.tensor_size_in_bytes()
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size) if size else b"", np.uint16).reshape(value.shape())
