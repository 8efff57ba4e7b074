"""The backend ``onnxruntime``: serves ``model.onnx``, a file, or a folder with the graph and external weights.

Its instances on one device are threads that share one session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from conch.backends.base.libraries import versioned
from conch.backends.graphs.graph import Graph, GraphBackend
from conch.backends.graphs.onnxruntime.session import (
    CPU,
    CUDA,
    OPENVINO,
    TENSORRT,
    Session,
    SessionSettings,
    model_file,
)
from conch.config.parameters import Parameter, ParameterTable
from conch.core.errors import invalid
from conch.machine.cores import pooled, usable_cores

# Names and messages are those of Triton's ONNX Runtime backend.


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
    Parameter("gpu_mem_limit", "bytes", "ONNX Runtime's", "memory that the CUDA provider may take"),
    Parameter(
        "arena_extend_strategy",
        "`0`: to a power of two, `1`: as requested",
        "ONNX Runtime's",
        "how the CUDA provider's memory grows",
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
            "size of the pool that computes an operator",
        ),
        Parameter(
            "inter_op_thread_count", "threads", "ONNX Runtime's", "size of the pool that runs operators side by side"
        ),
        Parameter("execution_mode", "`0`, `1`", "`0`", "operators one after the other, or side by side"),
        Parameter("enable_mem_arena", "`0`, `1`", "`1`", "keep memory for later runs"),
        Parameter("enable_mem_pattern", "`0`, `1`", "`1`", "plan memory by the shapes of earlier runs"),
        Parameter(_SHRINKAGE, "as `cpu:0`", "none", "give memory back after each run"),
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
    parameters = {name: parameter.get("string_value", "") for name, parameter in config.get("parameters", {}).items()}
    threads, inter_op = (
        _threads(name, _number(parameters, name, _number(backend_config, name, 0)))
        for name in ("intra_op_thread_count", "inter_op_thread_count")
    )
    optimization = config.get("optimization", {})
    level = int(optimization.get("graph", {}).get("level", 0))
    if level not in _GRAPH_LEVELS:
        raise invalid(f"optimization.graph.level is {level}; it must be -1, 0, 1 or 2")
    mode = _number(parameters, "execution_mode", 0)
    if mode not in (0, 1):
        raise invalid(f"parameter 'execution_mode' is {mode}; it must be 0 (sequential) or 1 (parallel)")
    return SessionSettings(
        threads=threads or pooled(cores, instances),
        inter_op_threads=inter_op,
        parallel=mode == 1,
        graph=_GRAPH_LEVELS[level],
        memory_arena=bool(_number(parameters, "enable_mem_arena", 1)),
        memory_pattern=bool(_number(parameters, "enable_mem_pattern", 1)),
        entries={name: value for name, value in parameters.items() if name.startswith("session.")},
        run_entries={_SHRINKAGE: parameters[_SHRINKAGE]} if _SHRINKAGE in parameters else {},
        providers=_providers(optimization.get("execution_accelerators", {}), parameters, kind, device_id),
    )


def _number(values: Mapping[str, str], name: str, default: int) -> int:
    if name not in values:
        return default
    try:
        return int(values[name])
    except ValueError:
        raise invalid(f"failed to convert {name} '{values[name]}' to integral number") from None


def _threads(name: str, count: int) -> int:
    if not 0 <= count < 1 << 31:
        raise invalid(
            f"{name} is {count}; it must be the size of a pool of threads, or 0 for as many as there are cores"
        )
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
