"""The backend ``onnxruntime``: serves ``model.onnx``, a file, or a folder with the graph and external weights.

Its instances on one device are threads that share one session. Names of parameters and messages are those of Triton's
ONNX Runtime backend. ``Session`` is also used by the engine ``onnxruntime`` of the Hugging Face backend and by
``conch convert``.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array, Strings
from conch.backends.base.backend_base import versioned
from conch.backends.graphs.graph import Graph, GraphBackend
from conch.backends.graphs.signature import GraphTensor, integer_of
from conch.config.parameters import Parameter, ParameterTable, parameter_texts
from conch.core.errors import ConchError, internal, invalid, unavailable, unsupported
from conch.machine import extras
from conch.machine.facts import shared_pool_threads, usable_cores

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"
TENSORRT: Final = "TensorrtExecutionProvider"
OPENVINO: Final = "OpenVINOExecutionProvider"
#: PyPI packages of ONNX Runtime by the provider that they include.
_PACKAGES: Final = {CUDA: "onnxruntime-gpu", TENSORRT: "onnxruntime-gpu", OPENVINO: "onnxruntime-openvino"}

#: Protocol datatypes by ONNX Runtime's name in ``tensor(...)``.
DATATYPES: Final[dict[str, str]] = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "bfloat16": "BF16", "float": "FP32",
    "double": "FP64", "string": "BYTES",
}  # fmt: skip
_BFLOAT16: Final = 16  # onnx.TensorProto.BFLOAT16
_ERROR: Final = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Settings for opening and running a graph.

    ``threads`` is the size of the intra-op pool, including the calling thread; 0 is ONNX Runtime's choice. ``graph`` is
    the optimization level: ``all``, ``extended``, ``basic`` or ``disable_all``. ``entries`` are session options by key,
    ``run_entries`` run options by key, and ``providers`` the execution providers with their options, best first.
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

    Raises UNAVAILABLE if the file does not exist, UNSUPPORTED if a library or provider is missing or the graph cannot
    be run, and otherwise INTERNAL with ONNX Runtime's message.
    """

    def __init__(self, path: Path, settings: SessionSettings) -> None:
        runtime = self._runtime = extras.load("running ONNX models", "onnxruntime")
        if not path.exists():
            raise unavailable(f"unable to find '{path}'")
        missing = [name for name, _ in settings.providers if name not in runtime.get_available_providers()]
        if missing:
            raise unsupported(
                f"'{path.name}' requires {missing[0]}, which the installed onnxruntime lacks: install "
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
            # Only ``run_with_ort_values`` returns BF16, and only ``run`` accepts strings.
            raise unsupported(f"'{path.name}' has BF16 outputs and strings, which cannot be run together")

    def run(self, names: Sequence[str], arrays: Mapping[str, Array]) -> list[Array]:
        """Run once and return the outputs ``names``; only for graphs with numpy datatypes."""
        try:
            # numpy arrays have the lowest overhead: 5 µs; a new io_binding takes 10 µs, OrtValues take 40 µs.
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
        """Return an input as a numpy array, or as an OrtValue if numpy lacks its datatype."""
        if isinstance(value, Strings):
            return _texts(name, value)
        if name not in self._bfloat16_in:
            return np.ascontiguousarray(value).reshape(value.shape)
        bits = np.ascontiguousarray(value, np.uint16)
        return self._runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _BFLOAT16)


def runtime_error(error: Exception) -> ConchError:
    """Convert an ONNX Runtime exception to an error with Triton's message."""
    if isinstance(error, ConchError):
        return error
    match = _ERROR.match(str(error))
    return internal(f"onnx runtime error {match[1]}: {match[2].strip()}" if match else f"onnx runtime error: {error}")


def model_file(version_directory: str | Path, filename: str) -> Path:
    """Return the path of the graph: ``filename``, or ``model.onnx`` in a folder of that name, next to its weights."""
    path = Path(version_directory) / (filename or "model.onnx")
    return path / "model.onnx" if path.is_dir() else path


def _options(runtime: Any, settings: SessionSettings) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # fatal only: errors are raised
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = settings.inter_op_threads
    options.execution_mode = getattr(runtime.ExecutionMode, "ORT_PARALLEL" if settings.parallel else "ORT_SEQUENTIAL")
    options.graph_optimization_level = getattr(
        runtime.GraphOptimizationLevel,
        f"ORT_{'' if settings.graph == 'disable_all' else 'ENABLE_'}{settings.graph}".upper(),
    )
    options.enable_cpu_mem_arena = settings.memory_arena
    options.enable_mem_pattern = settings.memory_pattern
    # The pool's threads spin during a run, which makes short runs a third faster, but not after it: spinning threads
    # would take cores from the threads that receive, tokenize and send.
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
    """Convert an OrtValue to a numpy array, BF16 to its 16-bit values."""
    if value.element_type() != _BFLOAT16:
        array: Array = value.numpy()
        return array
    size = value.tensor_size_in_bytes()
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size) if size else b"", np.uint16).reshape(value.shape())


#: Optimization levels by ``optimization.graph.level``; the default is 0.
_GRAPH_LEVELS: Final = {-1: "basic", 0: "all", 1: "extended", 2: "disable_all"}
#: Model parameters that are options of the CUDA provider.
_CUDA_OPTIONS: Final = (
    Parameter(
        "cudnn_conv_algo_search",
        "`0`: exhaustive, `1`: heuristic, `2`: default",
        "ONNX Runtime's",
        "how the CUDA provider chooses algorithms of convolutions",
    ),
    Parameter("gpu_mem_limit", "bytes", "ONNX Runtime's", "maximum memory of the CUDA provider"),
    Parameter(
        "arena_extend_strategy",
        "`0`: to a power of two, `1`: as requested",
        "ONNX Runtime's",
        "how the CUDA provider's memory pool grows",
    ),
    Parameter(
        "do_copy_in_default_stream", "`0`, `1`", "ONNX Runtime's", "copy to and from the GPU in CUDA's default stream"
    ),
)
_CONVOLUTIONS: Final = {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}
_ARENAS: Final = {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"}
#: Triton's accelerators that ONNX Runtime does not have; ignored.
_WITHOUT_EFFECT: Final = ("auto_mixed_precision", "gpu_io")
_TENSORRT_OPTIONS: Final = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_SHRINKAGE: Final = "memory.enable_memory_arena_shrinkage"

PARAMETERS: Final = ParameterTable(
    "onnxruntime",
    (
        Parameter(
            "intra_op_thread_count",
            "threads",
            "the usable cores, shared by the instances",
            "threads that compute one operator",
        ),
        Parameter(
            "inter_op_thread_count", "threads", "ONNX Runtime's", "threads that run different operators in parallel"
        ),
        Parameter("execution_mode", "`0`, `1`", "`0`", "run operators sequentially, or in parallel"),
        Parameter("enable_mem_arena", "`0`, `1`", "`1`", "keep freed memory for reuse"),
        Parameter("enable_mem_pattern", "`0`, `1`", "`1`", "plan memory by the shapes of earlier runs"),
        Parameter(_SHRINKAGE, "such as `cpu:0`", "none", "return memory to the system after each run"),
        *_CUDA_OPTIONS,
    ),
    prefix="session.",
)

Providers = list[tuple[str, dict[str, str]]]


def session_settings(
    config: Mapping[str, Any],
    backend_config: Mapping[str, str],
    *,
    kind: str,
    device_id: int,
    instances: int,
    cores: int,
) -> SessionSettings:
    """Return settings for the session that ``instances`` threads on a device of ``kind`` (``CPU``, ``GPU``) share.

    Raises INVALID_ARG with the name of an invalid value.
    """
    parameters = parameter_texts(config)
    threads, inter_op = (
        _threads(name, integer_of(parameters, name, integer_of(backend_config, name, 0)))
        for name in ("intra_op_thread_count", "inter_op_thread_count")
    )
    optimization = config.get("optimization", {})
    level = int(optimization.get("graph", {}).get("level", 0))
    if level not in _GRAPH_LEVELS:
        raise invalid(f"optimization.graph.level is {level}; it must be -1, 0, 1 or 2")
    mode = integer_of(parameters, "execution_mode", 0)
    if mode not in (0, 1):
        raise invalid(f"parameter 'execution_mode' is {mode}; it must be 0 (sequential) or 1 (parallel)")
    return SessionSettings(
        threads=threads or shared_pool_threads(cores, instances),
        inter_op_threads=inter_op,
        parallel=mode == 1,
        graph=_GRAPH_LEVELS[level],
        memory_arena=bool(integer_of(parameters, "enable_mem_arena", 1)),
        memory_pattern=bool(integer_of(parameters, "enable_mem_pattern", 1)),
        entries={name: value for name, value in parameters.items() if name.startswith("session.")},
        run_entries={_SHRINKAGE: parameters[_SHRINKAGE]} if _SHRINKAGE in parameters else {},
        providers=_providers(optimization.get("execution_accelerators", {}), parameters, kind, device_id),
    )


def _threads(name: str, count: int) -> int:
    if not 0 <= count < 1 << 31:
        raise invalid(f"{name} is {count}; it must be the size of a pool of threads, or 0 for one thread per core")
    return count


def _providers(accelerators: Mapping[str, Any], parameters: Mapping[str, str], kind: str, device: int) -> Providers:
    """Return the execution providers in order of preference: accelerators first, the CPU last."""
    on_gpu = list(_on_gpu(accelerators.get("gpu_execution_accelerator", ()), device))
    on_cpu = list(_on_cpu(accelerators.get("cpu_execution_accelerator", ())))
    if kind != "GPU":
        return [*on_cpu, (CPU, {})]
    providers = dict(on_gpu)
    options = _cuda_options(parameters) | providers.pop(CUDA, {})
    return [*providers.items(), (CUDA, {"device_id": str(device), **options}), (CPU, {})]


def _on_gpu(accelerators: list[dict[str, Any]], device: int) -> Iterator[tuple[str, dict[str, str]]]:
    for accelerator in accelerators:
        parameters = accelerator.get("parameters", {})
        match accelerator["name"]:
            case "tensorrt":
                yield TENSORRT, {"device_id": str(device), **_tensorrt_options(parameters)}
            case "cuda":
                yield CUDA, dict(parameters)
            case name if name not in _WITHOUT_EFFECT:
                raise invalid(f"unknown Execution Accelerator '{name}' is requested")


def _on_cpu(accelerators: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, str]]]:
    for accelerator in accelerators:
        if accelerator["name"] != "openvino":
            raise invalid(f"unknown Execution Accelerator '{accelerator['name']}' is requested")
        yield OPENVINO, {"device_type": "CPU", **accelerator.get("parameters", {})}


def _tensorrt_options(parameters: Mapping[str, str]) -> dict[str, str]:
    options = {}
    for name, value in parameters.items():
        if name == "precision_mode":
            if value not in ("FP32", "FP16", "INT8"):
                raise invalid(f"unsupported precision mode '{value}' is requested")
            if value != "FP32":
                options[f"trt_{value.lower()}_enable"] = "1"
        elif name.startswith("trt_"):
            options[name] = value
        elif name in _TENSORRT_OPTIONS:
            options[_TENSORRT_OPTIONS[name]] = value
        else:
            raise invalid(f"unknown parameter '{name}' is provided for TensorRT Execution Accelerator")
    return options


def _cuda_options(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the options of the CUDA provider, with Triton's numbers replaced by ONNX Runtime's names."""
    options = {option.name: parameters[option.name] for option in _CUDA_OPTIONS if option.name in parameters}
    for name, words in (("cudnn_conv_algo_search", _CONVOLUTIONS), ("arena_extend_strategy", _ARENAS)):
        if name in options:
            options[name] = words.get(options[name], options[name])
    return options


class OnnxRuntimeBackend(GraphBackend):
    """One ONNX model on one device."""

    def model_file(self) -> Path:
        return model_file(self.model["version_directory"], self.model["filename"])

    def inspect(self, path: Path) -> Graph:
        # Prepacking weights and folding constants takes time and is not needed to read the tensors.
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
        self.runtime_facts = {"engine": versioned("onnxruntime"), "providers": " ".join(session.providers)}
        if settings.threads:
            self.runtime_facts["threads"] = str(settings.threads)
        return session
