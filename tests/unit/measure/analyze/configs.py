"""Configurations as a server shows them."""

from __future__ import annotations

from typing import Any


def batching_model(name: str = "m", **changes: Any) -> dict[str, Any]:
    """A model with one instance and batches of up to 8."""
    return {
        "name": name,
        "backend": "onnxruntime",
        "platform": "onnxruntime_onnx",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 8,
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [4]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]}],
        "instance_group": [{"name": f"{name}_0", "kind": "KIND_CPU", "count": 1}],
        "dynamic_batching": {},
        **changes,
    }
