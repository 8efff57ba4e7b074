"""Selects and opens the engine for a checkpoint's network; the module of an engine is imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from conch.backends.base.arrays import Array
from conch.backends.tasks.engines.base import NetworkEngine
from conch.checkpoints.files import engines_of
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import Code, ConchError, invalid, unsupported

#: The number of shapes whose engine is cached; selecting it again takes a few microseconds.
_REMEMBERED: Final = 4096


class EnginesByShape(NetworkEngine):
    """An engine that runs ``other`` if ``other_at(rows, tokens)`` is true, else ``usual``.

    The choice depends only on the shape, so the same batch always gets the same outputs. Name, precision and device are
    those of ``usual``. Raises INVALID_ARG if the outputs of the two engines differ in name.
    """

    def __init__(self, usual: NetworkEngine, other: NetworkEngine, other_at: Callable[[int, int], bool]) -> None:
        if set(usual.outputs) != set(other.outputs):
            raise invalid(
                f"variants '{usual.variant}' and '{other.variant}' of one model give {', '.join(usual.outputs)} and "
                f"{', '.join(other.outputs)}: convert it again, or set parameter 'by_shape' to false"
            )
        self.name, self.device, self.precision, self.variant = usual.name, usual.device, usual.precision, usual.variant
        self.inputs, self.outputs = usual.inputs | other.inputs, usual.outputs
        self._usual, self._other = usual, other
        self._at = lru_cache(_REMEMBERED)(lambda rows, tokens: other if other_at(rows, tokens) else usual)

    @property
    def parts(self) -> Sequence[NetworkEngine]:
        return (self._usual, self._other)

    def padded_shape(self, rows: int, length: int) -> tuple[int, int]:
        return self._at(rows, length).padded_shape(rows, length)

    def require_tensors(self, arrays: Mapping[str, Array]) -> None:
        for engine in self.parts:
            engine.require_tensors(arrays)

    def reference(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return self._usual.reference(arrays)

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        rows, tokens = arrays["input_ids"].shape
        return self._at(rows, tokens).run(arrays)


#: PyTorch dtypes by variant precision.
_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: Precisions by PyTorch dtype.
PRECISIONS: Final = {dtype: precision for precision, dtype in _DTYPES.items()}


def open_engine(
    checkpoint: Checkpoint,
    options: Options,
    *,
    head: str,
    device: str = "cpu",
    device_id: int = 0,
    instances: int = 1,
) -> NetworkEngine:
    """Open the engine for ``checkpoint`` on ``device`` (``cpu``, ``cuda``), for ``instances`` concurrent threads.

    ``head`` is the class of transformers that loads the network; only torch uses it. The order of precedence is: the
    variant or engine in the options, the verdict of ``conch convert`` (which may select between two variants by shape),
    the files in the folder. A verdict is measured on a CPU, so on a GPU the checkpoint's own weights take precedence
    over it. Raises INVALID_ARG if the requested variant or engine does not exist, UNSUPPORTED if a library is missing.
    If the second variant is UNSUPPORTED, the first runs alone and sets ``warning``.
    """
    name, precision, graph = choose(checkpoint, options, device)
    engine = _open(checkpoint, options, head, device, device_id, instances, name, precision, graph)
    variant, companion = checkpoint.variant, checkpoint.companion
    if variant is not None and (variant.engine, variant.precision) == (name, precision):
        engine.variant = variant.name
    if companion is None or checkpoint.manifest is None or device != "cpu":
        return engine
    beside = replace(checkpoint, variant=checkpoint.manifest.variant(companion.variant), manifest=None)
    try:
        other = open_engine(beside, options, head=head, instances=instances)
    except ConchError as error:
        if error.code is not Code.UNSUPPORTED:
            raise
        engine.warning = f"'{engine.variant}' runs for all shapes, as '{companion.variant}' cannot: {error.message}"
        return engine
    return EnginesByShape(engine, other, companion.faster_at)


def _open(
    checkpoint: Checkpoint,
    options: Options,
    head: str,
    device: str,
    device_id: int,
    instances: int,
    engine: str,
    precision: str,
    graph: Path | None,
) -> NetworkEngine:
    if engine == "torch":
        from conch.backends.tasks.engines.torch import TorchEngine

        return TorchEngine(
            checkpoint.directory,
            head,
            dtype=_DTYPES.get(precision, "auto"),
            device=device,
            device_id=device_id,
            threads=options.threads,
            instances=instances,
            trust_remote_code=options.trust_remote_code,
        )
    if graph is None:
        raise invalid(f"checkpoint {checkpoint.directory} has no graph for engine '{engine}': convert it, or use torch")
    if engine == "openvino" and device != "cpu":
        raise unsupported("engine 'openvino' runs on CPUs: set instance_group kind KIND_CPU, or another engine")
    if graph.suffix == ".plan":
        raise unsupported(f"'{graph.name}' is a serialised TensorRT engine: choose a variant that is an ONNX file")

    if engine == "openvino":
        from conch.backends.tasks.engines.openvino import OpenVinoEngine

        return OpenVinoEngine(graph, precision=precision, threads=options.threads, instances=instances)
    from conch.backends.tasks.engines.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine(
        graph,
        precision=precision,
        threads=options.threads,
        instances=instances,
        device=device,
        device_id=device_id,
        tensorrt=engine == "tensorrt",
    )


def choose(checkpoint: Checkpoint, options: Options, device: str = "cpu") -> tuple[str, str, Path | None]:
    """Return the engine's name, its precision (empty if not specified) and the graph file (None without a graph)."""
    present = engines_of(checkpoint.directory)
    if device != "cpu" and not options.variant and options.engine == "auto" and "torch" in present:
        return "torch", _requested_precision(options), None
    variant = checkpoint.variant
    if variant is not None:
        graph = checkpoint.directory / variant.path if variant.path else None
        return variant.engine, variant.precision, graph
    engine = checkpoint.engine
    return engine, _requested_precision(options) if engine == "torch" else "fp32", checkpoint.graph_file(engine)


def _requested_precision(options: Options) -> str:
    """Return the precision that the option ``dtype`` selects for torch; empty for others."""
    return PRECISIONS.get(options.dtype, "")
