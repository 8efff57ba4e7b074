"""ONNX files: running one on the CPU, comparing it with the network it was made from, and where its weights lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.convert.encoder.network import ReferenceNetwork
from conch.convert.libraries import silence_libraries
from conch.errors import internal

#: A graph that keeps its arithmetic agrees this closely, as a share of the largest value (or of 1).
TOLERANCE: Final = 1e-3
#: Larger weights go into a file beside the graph, in bytes: a graph with weights cannot exceed 2 GiB.
MAX_BYTES: Final = 1_500_000_000


def session(path: Path) -> Any:
    """``path`` in ONNX Runtime on the CPU, without its log lines."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def run(loaded: Any, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """One run of a session: the outputs by name."""
    names = [output.name for output in loaded.get_outputs()]
    feed = {tensor.name: arrays[tensor.name] for tensor in loaded.get_inputs()}
    return dict(zip(names, loaded.run(names, feed), strict=True))


def verify(path: Path, network: ReferenceNetwork) -> None:
    """Compare ``path`` with the network at several sizes; INTERNAL tells where it disagrees."""
    loaded = session(path)
    for arrays, expected in network.tests():
        compare(run(loaded, arrays), expected, arrays)


def compare(actual: Mapping[str, Array], expected: Mapping[str, Array], arrays: Mapping[str, Array]) -> None:
    """INTERNAL when an output differs by more than ``TOLERANCE``; what stands at padding does not count."""
    size = "x".join(map(str, next(iter(arrays.values())).shape))
    mask = arrays.get("attention_mask")
    for name, reference in expected.items():
        value = actual[name]
        if value.shape != reference.shape:
            raise internal(f"{name} has shape {list(value.shape)} and not {list(reference.shape)} for input {size}")
        if mask is not None and reference.shape[:2] == mask.shape:
            value, reference = value[mask == 1], reference[mask == 1]
        difference = float(np.abs(value - reference).max())
        allowed = TOLERANCE * max(1.0, float(np.abs(reference).max()))
        # Written so that a NaN fails.
        if not difference <= allowed:
            raise internal(f"{name} differs from torch by {difference:.2g} for input {size}; {allowed:.2g} is allowed")


def write(model: Any, path: Path) -> None:
    """Save an ``onnx.ModelProto``, with the weights in ``<path>.data`` when they are large."""
    import onnx

    with silence_libraries():
        large = model.ByteSize() > MAX_BYTES
        onnx.save_model(
            model, path, save_as_external_data=large, all_tensors_to_one_file=True, location=path.name + ".data"
        )


def is_large(path: Path) -> bool:
    """Whether the weights of ``path`` are, or must be, beside it."""
    data = path.with_name(path.name + ".data")
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0) > MAX_BYTES
