"""``conch doctor`` on this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conch import __version__
from conch.cli import main
from conch.options.settings import SERVER_VERSION


def test_the_report_has_all_sections_and_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line and not line.startswith(" ")] == [
        "Versions", "Engines and extras", "GPUs", "Processor", "Memory and limits", "Ports", "Hub's cache",
        "What would help",
    ]  # fmt: skip
    engines = lines[lines.index("Engines and extras") : lines.index("GPUs")]
    # A command is a line of its own, which a terminal may break.
    assert max(len(line.rstrip()) for line in engines if "pip install" not in line) <= 80


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["conch"], document["protocol"]) == (__version__, SERVER_VERSION)
    assert {"torch", "openvino", "onnxruntime", "vllm"} <= {package["name"] for package in document["packages"]}
    assert {"name", "usable", "features"} <= document["processor"].keys()
    assert isinstance(document["advice"], list)


def test_no_engine_is_imported_for_its_version() -> None:
    program = (
        "import sys; from conch.cli import main; main(['doctor', '--json']);"
        "print(sorted({'torch', 'transformers', 'onnxruntime', 'openvino', 'vllm', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
