"""Small models for analyses: they wait, as a device would make them, and may fail under some configurations."""

from __future__ import annotations

from pathlib import Path

CONFIG = """\
# What people wrote stays.
backend: "python"
max_batch_size: 2
input [{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }]
instance_group [{ count: 1 kind: KIND_CPU }]
"""
MODEL = """\
import json
import os
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.dies = config["max_batch_size"] == 4
        if config["max_batch_size"] == 8:
            raise ValueError("8 does not fit")

    def execute(self, requests):
        if self.dies:
            os._exit(3)
        time.sleep(0.01)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(one, "x").as_numpy())])
            for one in requests
        ]
"""
ENSEMBLE = """\
platform: "ensemble"
max_batch_size: 2
input [{ name: "a" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "b" data_type: TYPE_FP32 dims: [ 4 ] }]
ensemble_scheduling { step [ { model_name: "waits" model_version: -1
  input_map { key: "x" value: "a" } output_map { key: "y" value: "b" } } ] }
"""


def write(repository: Path) -> Path:
    """``waits``, which dies with batches of 4 and does not load with 8, and the ensemble ``both`` of it."""
    (repository / "waits" / "1").mkdir(parents=True)
    (repository / "waits" / "config.pbtxt").write_text(CONFIG)
    (repository / "waits" / "1" / "model.py").write_text(MODEL)
    (repository / "both" / "1").mkdir(parents=True)
    (repository / "both" / "config.pbtxt").write_text(ENSEMBLE)
    return repository
