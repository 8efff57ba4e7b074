"""Runs ONNX files on the CPU, compares them with their source network, and stores their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.convert.encoder.network import ReferenceNetwork
from conch.convert.libraries import silence_libraries
from conch.core.errors import internal

#: The maximum difference of a graph with unchanged arithmetic, relative to the largest value (at least 1).
TOLERANCE: Final = 1e-3
#: Larger weights (bytes) are written to a file beside the graph, because a graph with weights cannot exceed 2 GiB.
MAX_BYTES: Final = 1_500_000_000


def session(path: Path) -> Any:
    """Open ``path`` in ONNX Runtime on the CPU, without log lines."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def run(loaded: Any, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Run a session once; returns the outputs by name."""
    names = [output.name for output in loaded.get_outputs()]
    feed = {tensor.name: arrays[tensor.name] for tensor in loaded.get_inputs()}
    return dict(zip(names, loaded.run(names, feed), strict=True))


def verify(path: Path, network: ReferenceNetwork) -> None:
    """Compare ``path`` with the network at several sizes; raises INTERNAL if they disagree."""
    loaded = session(path)
    for arrays, expected in network.tests():
        compare(run(loaded, arrays), expected, arrays)


def compare(actual: Mapping[str, Array], expected: Mapping[str, Array], arrays: Mapping[str, Array]) -> None:
    """Raise INTERNAL if an output differs by more than ``TOLERANCE``, ignoring padding."""
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
        # NaN must fail, too.
        if not difference <= allowed:
            raise internal(f"{name} differs from torch by {difference:.2g} for input {size}; {allowed:.2g} is allowed")


def write(model: Any, path: Path) -> None:
    """Save an ``onnx.ModelProto``; large weights are written to ``<path>.data``."""
    import onnx

    with silence_libraries():
        large = model.ByteSize() > MAX_BYTES
        onnx.save_model(
            model, path, save_as_external_data=large, all_tensors_to_one_file=True, location=path.name + ".data"
        )


def is_large(path: Path) -> bool:
    """Return whether the weights of ``path`` are, or must be, stored in a separate file."""
    data = path.with_name(path.name + ".data")
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0) > MAX_BYTES
