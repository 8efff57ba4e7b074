"""``conch check`` over a repository from a stranger: it ends, says what is wrong, and runs nothing that it finds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from conch.repository.checks.missing_imports import missing_modules
from conch.repository.checks.repository import check

GOOD = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
OUTPUT = 'output { name: "B" data_type: TYPE_FP32 dims: 4 }\n'
ENVIRONMENT = (
    'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env" } }\nname: "model"\n'
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder with one version."""
    directory = tmp_path / "model"
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(OUTPUT)
    (directory / "1" / "model.py").write_text(GOOD)
    return directory


def lines(model: Path) -> list[str]:
    return [str(finding).replace(f"{model.parent}/", "") for finding in check([model.parent])]


@pytest.mark.parametrize("name", ["1/model.py", "1/model.json", "labels.txt", "1/helper.py"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(model: Path, name: str) -> None:
    (model / "1" / "model.py").write_text(f"import helper\n{GOOD}")
    if name == "1/model.json":
        (model / "config.pbtxt").unlink()
        (model / "1" / "model.py").unlink()
    if name == "labels.txt":
        (model / "config.pbtxt").write_text(OUTPUT.replace("}", 'label_filename: "labels.txt" }'))
        (model / "1" / "model.py").write_text(GOOD)
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)

    found = lines(model)

    if name != "1/helper.py":
        assert any("it is not a regular file" in line for line in found), found


def test_a_device_and_a_huge_file_are_not_read(model: Path) -> None:
    (model / "1" / "model.py").unlink()
    (model / "1" / "model.py").symlink_to("/dev/zero")
    assert lines(model) == ["model/1/model.py: error: cannot be read: it is not a regular file"]

    with (model / "config.pbtxt").open("wb") as file:
        file.truncate(1 << 30)
    assert lines(model) == ["model: error: it has 1,073,741,824 bytes; at most 16,777,216 are allowed"]


def test_the_interpreter_of_an_environment_is_not_run(model: Path) -> None:
    (model / "config.pbtxt").write_text(OUTPUT + ENVIRONMENT)
    (model / "1" / "model.py").write_text(f"import json, there, lost\n{GOOD}")
    (model / "env" / "bin").mkdir(parents=True)
    site = model / "env" / "lib" / "python3.9" / "site-packages"
    (site / "there").mkdir(parents=True)
    (model / "env" / "bin" / "activate").touch()
    python = model / "env" / "bin" / "python"
    python.write_text(f"#!/bin/sh\ntouch {model.parent / 'ran'}\n")
    python.chmod(0o755)

    errors = [line for line in lines(model) if ": error: " in line]

    assert [line.partition(" (fix")[0] for line in errors] == ["model/1/model.py:1: error: there is no module 'lost'"]
    assert not (model.parent / "ran").exists()
    (site / "other.pth").write_text("/opt/modules\n")
    assert missing_modules(str(python), ["lost"]) == set(), "what a .pth file adds is not known"


def test_a_virtual_environment_has_the_standard_library_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "env/lib/python3.8/site-packages").mkdir(parents=True)
    (tmp_path / "base/lib/python3.8/old_module").mkdir(parents=True)
    (tmp_path / "env/pyvenv.cfg").write_text(f"home = {tmp_path}/base/bin\ninclude-system-site-packages = false\n")
    python = str(tmp_path / "env/bin/python")
    assert missing_modules(python, ["old_module", "lost"]) == {"lost"}
    (tmp_path / "env/pyvenv.cfg").write_text("include-system-site-packages = true\n")
    assert missing_modules(python, ["lost"]) == set()


def test_a_long_chain_of_calls_is_read(model: Path) -> None:
    (model / "1" / "model.py").write_text(f"import __main__\nx = y{'.z()' * 600}\n{GOOD}")
    assert lines(model) == []


def test_a_module_is_not_its_own_correction(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "conch.repository.checks.missing_imports.missing_modules", lambda python, names: frozenset(names)
    )
    (model / "1" / "model.py").write_text(f"import numpy\n{GOOD}")
    [line] = lines(model)
    assert "did you mean" not in line and sys.executable in line


def test_names_cannot_write_to_the_terminal(model: Path) -> None:
    os.mkdir(os.fsencode(model.parent) + b"/bad\xff")
    (model.parent / "red\x1b[31m").mkdir()
    (model.parent / "two\nlines").mkdir()

    found = lines(model)

    assert "bad\\xff: error: the name of a model must be UTF-8 (fix: rename it)" in found
    assert all(line.isprintable() for line in found), found
    assert any(line.startswith("red\\x1b[31m:") for line in found)
    assert any(line.startswith("two\\x0alines:") for line in found)


def test_a_directory_without_permission_is_a_finding(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "2").mkdir()
    iterdir = Path.iterdir

    def refusing(path: Path) -> object:  # root may read everything
        if path == model / "2":
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refusing)
    assert "model/2: error: cannot be read: Permission denied" in lines(model)
