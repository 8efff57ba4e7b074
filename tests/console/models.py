"""Models whose pages the tests of the console open."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_ECHO: Final = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        pb_utils.Logger.log_warn("a warning of the model")
        print("a line of the model", flush=True)
        time.sleep({seconds})

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in inputs]
"""
_TENSOR: Final = '{ name: "%s" data_type: TYPE_FP32 dims: [ -1 ] }'
_CONFIG: Final = f"input [{_TENSOR % 'IN'}] output [{_TENSOR % 'OUT'}]"
_STEP: Final = """{{ model_name: "echo" model_version: -1
    input_map {{ key: "IN" value: "{}" }} output_map {{ key: "OUT" value: "{}" }} }}"""


def add_model(folder: Path, name: str, seconds: int = 0) -> None:
    """Add a model that returns its input, logs two lines, and takes ``seconds`` to load."""
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / "model.py").write_text(_ECHO.format(seconds=seconds))
    (folder / name / "config.pbtxt").write_text(f'backend: "python" {_CONFIG}')


def add_chain(folder: Path, name: str) -> None:
    """Add an ensemble with two steps of the model ``echo``."""
    (folder / name / "1").mkdir(parents=True)
    steps = ", ".join(_STEP.format(source, target) for source, target in (("IN", "MIDDLE"), ("MIDDLE", "OUT")))
    (folder / name / "config.pbtxt").write_text(
        f'platform: "ensemble" {_CONFIG} ensemble_scheduling {{ step [ {steps} ] }}'
    )
