"""The CPythons of this machine, each in a virtual environment with numpy and nothing else, as a model may have it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

#: From the oldest that a Python model's environment may have to the newest that is released.
VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13")

_MARKS = {VERSIONS[0]: (), VERSIONS[-1]: pytest.mark.long}

#: Runs a test of the fixture ``launch`` once for each version; one that this machine lacks is skipped. The oldest
#: always runs, the newest is long, those between are slow. Tests without this mark run under the tests' interpreter.
every_python = pytest.mark.parametrize(
    "python",
    [pytest.param(version, marks=_MARKS.get(version, pytest.mark.slow)) for version in VERSIONS],
    indirect=True,
)


def find_interpreter(version: str) -> str | None:
    """The path of a CPython of ``version`` that runs: one of pyenv's, or what ``PATH`` has."""
    return next((path for path in _candidates(version) if _version(path) == f"cpython {version}"), None)


def make_environment(version: str, interpreter: str, cache: Path) -> str:
    """The interpreter of a virtual environment below ``cache``, which is made, with numpy, if it is missing."""
    home = cache / version
    python, complete = home / "bin" / "python", home / "complete"
    if not complete.exists():
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", "--without-pip", home], check=True)
        packages = home / "lib" / f"python{version}" / "site-packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        wheel = ["--only-binary=:all:", f"--python-version={version}", f"--target={packages}", "numpy"]
        subprocess.run([*pip, *wheel], check=True)
        complete.touch()
    return str(python)


def _candidates(version: str) -> Iterator[str]:
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        yield sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    yield from sorted(map(str, pyenv.glob(f"{version}.*/bin/python")), reverse=True)
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path


def _version(python: str) -> str:
    show = "import sys; print(sys.implementation.name, '%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", show], capture_output=True, text=True).stdout.strip()
