"""The fixture ``load_model``, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]

MODEL = """\
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([1], np.int32))]) for _ in requests]

    def finalize(self):
        open(os.path.join(pb_utils.get_model_dir(), "finalized"), "w").close()
"""
TESTS = """\
from pathlib import Path

def test_it_answers(load_model):
    assert load_model("m")()["OUT"].tolist() == [1]
    assert not Path("m/1/finalized").exists()

def test_it_was_finalised():
    assert Path("m/1/finalized").exists()
"""


def test_models_are_finalised_after_their_test(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(
        'backend: "python"\noutput { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }\n'
    )
    (tmp_path / "m" / "1" / "model.py").write_text(MODEL)
    (tmp_path / "test_m.py").write_text(TESTS)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conch.pytest_plugin", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "2 passed" in ended.stdout, ended.stdout + ended.stderr


def test_pytest_finds_it_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"conch": "conch.pytest_plugin"}


def test_a_run_of_pytest_without_models_pays_nothing() -> None:
    program = "import sys, conch.pytest_plugin; print('numpy' in sys.modules, 'conch.testing' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False False\n"
