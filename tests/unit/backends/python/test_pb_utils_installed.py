"""``triton_python_backend_utils`` outside of a worker: imported in any program, and known to type checkers."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest
import triton_python_backend_utils

from conch.backends.python import pb_utils

MODEL = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        values = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
        output = pb_utils.{tensor}
        return [pb_utils.InferenceResponse([output])]
"""


def test_it_is_the_module_that_workers_have() -> None:
    names = set(pb_utils.__all__)
    assert set(triton_python_backend_utils.__all__) == names
    assert {name for name in names if getattr(triton_python_backend_utils, name) is getattr(pb_utils, name)} == names


def test_a_program_may_import_it(tmp_path: Path) -> None:
    program = "import triton_python_backend_utils as p, numpy as n; print(p.Tensor('X', n.zeros((2, 3))).shape())"
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("[2, 3]\n", "")


@pytest.mark.long
@pytest.mark.slow
def test_mypy_knows_it(tmp_path: Path) -> None:
    complaints = {
        'Tensor("OUT", values)': "",
        "Tensor(1, values)": 'Argument 1 to "Tensor" has incompatible type "int"',
        'Tensr("OUT", values)': 'Module has no attribute "Tensr"',
    }
    for number, tensor in enumerate(complaints):
        (tmp_path / f"model{number}.py").write_text(MODEL.replace("{tensor}", tensor))
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path}/cache", "."]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    for number, complaint in enumerate(complaints.values()):
        told = [line for line in ended.stdout.splitlines() if line.startswith(f"model{number}.py:")]
        assert [complaint in line for line in told] == [True] * bool(complaint), ended.stdout + ended.stderr


def test_no_client_of_triton_ships_one_too() -> None:
    assert [str(file) for file in files("tritonclient") or () if "backend_utils" in str(file)] == []
