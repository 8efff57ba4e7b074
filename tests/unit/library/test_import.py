"""``import conch`` costs nothing and offers everything."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import conch
from tests.unit.backends.python.interpreters import VERSIONS, find_interpreter

SOURCE = Path(conch.__file__)


def test_import_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import conch; print(*(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) - {"__future__"} == {"conch"}


def test_every_name_that_is_offered_is_there() -> None:
    for name in conch.__all__:
        assert getattr(conch, name) is not None
    assert set(conch.__all__) <= set(dir(conch))


def test_type_checkers_see_what_is_imported_when_it_is_used() -> None:
    tree = ast.parse(SOURCE.read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
    assert all(getattr(conch, name) is getattr(import_module(module), name) for name, module in seen.items())
    assert {*seen, "__version__"} == set(conch.__all__)


def test_name_that_is_not_offered_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'conch' has no attribute 'Sever'"):
        conch.Sever  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("version", VERSIONS)
def test_import_works_under_every_python_of_workers(version: str) -> None:
    python = find_interpreter(version)
    if python is None:
        pytest.skip(f"no CPython {version} here")
    code = "import conch; print(conch.__version__, conch.Code.INTERNAL.name)"
    result = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SOURCE.parents[1])}
    )
    assert result.stdout.split() == [conch.__version__, "INTERNAL"]
