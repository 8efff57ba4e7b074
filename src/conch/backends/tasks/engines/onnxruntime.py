"""The engine ``onnxruntime``: an exported graph in ONNX Runtime, on the CPU or an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conch.backends.graphs.onnxruntime.session import CPU, CUDA, TENSORRT, Session, SessionSettings
from conch.backends.tasks.engines.graph import GraphEngine
from conch.machine.cores import pooled, usable_cores


class OnnxRuntimeEngine(GraphEngine):
    """A graph for ``instances`` concurrent threads that share ``threads`` cores (0: all usable cores).

    ``device`` is ``cpu`` or ``cuda``. With ``tensorrt``, TensorRT builds the supported parts of the graph on first use,
    in the engine's precision, and CUDA runs the rest. Raises the errors of :class:`Session`.
    """

    name = "onnxruntime"

    def __init__(
        self,
        path: Path,
        *,
        precision: str = "fp32",
        threads: int = 0,
        instances: int = 1,
        device: str = "cpu",
        device_id: int = 0,
        tensorrt: bool = False,
    ) -> None:
        size = pooled(threads or usable_cores(), instances)
        providers = [(CPU, {})] if device == "cpu" else _on_gpu(device_id, precision if tensorrt else "")
        super().__init__(Session(path, SessionSettings(threads=size, providers=providers)), precision, device)


def _on_gpu(device_id: int, tensorrt: str) -> Sequence[tuple[str, dict[str, str]]]:
    device = {"device_id": str(device_id)}
    providers = [(CUDA, device), (CPU, {})]
    if tensorrt:
        precision = {f"trt_{tensorrt}_enable": "1"} if tensorrt in ("fp16", "bf16", "int8") else {}
        providers.insert(0, (TENSORRT, {**device, **precision}))
    return providers
