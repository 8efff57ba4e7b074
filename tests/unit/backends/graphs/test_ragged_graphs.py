"""Graphs that take requests of other shapes together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conch.backends.base.arrays import Request
from conch.backends.graphs.onnxruntime import OnnxRuntimeBackend
from conch.backends.graphs.openvino import OpenVinoBackend
from conch.backends.graphs.pytorch import PyTorchBackend
from conch.core.tensors import WireTensor
from tests import onnx_graphs
from tests.torch_programs import Ragged, save_script
from tests.unit.backends.tensor_backends import initialise, start, tensor

RAGGED: dict[str, Any] = {
    "max_batch_size": 4,
    "input": [tensor("x", "TYPE_FP32", -1) | {"allow_ragged_batch": True}],
    "output": [tensor("y", "TYPE_FP32", -1), tensor("totals", "TYPE_FP32") | {"dims": [1], "reshape": {"shape": []}}],
    "batch_input": [
        {
            "kind": "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
            "target_name": ["ends"],
            "data_type": "TYPE_INT32",
            "source_input": ["x"],
        }
    ],
    "batch_output": [{"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["y"], "source_input": ["x"]}],
}


@pytest.mark.parametrize("kind", [OnnxRuntimeBackend, OpenVinoBackend, PyTorchBackend])
@pytest.mark.parametrize("widths", [(3,), (3, 1), (1, 4, 2)])
def test_requests_of_other_shapes_are_computed_together(tmp_path: Path, kind: Any, widths: tuple[int, ...]) -> None:
    filename = "model.pt" if kind is PyTorchBackend else "model.onnx"
    if kind is PyTorchBackend:
        save_script(Ragged(), tmp_path / filename)
    else:
        onnx_graphs.ragged(tmp_path / filename)
    backend = start(initialise(kind, tmp_path, RAGGED, filename=filename))
    values = [np.arange(1, width + 1, dtype=np.float32)[None] for width in widths]
    requests = [
        Request({"x": WireTensor("x", "FP32", x.shape, x.tobytes())}, frozenset(("y", "totals"))) for x in values
    ]
    results, _ = backend.run(requests)
    for result, x in zip(results, values, strict=True):
        np.testing.assert_array_equal(result.outputs["y"], 2 * x)
        np.testing.assert_array_equal(result.outputs["totals"], [x.sum()])
