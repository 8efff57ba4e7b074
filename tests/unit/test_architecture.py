"""The shape of the house, as ARCHITECTURE.md and pyproject.toml describe it."""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "conch"
#: Repositories, templates and backends in Python hold models, which are no modules of ours.
MODELS = ("backends/shipped/", "demo/repository/", "cli/templates/", "convert/templates/")
#: Modules that import everything, or nothing.
OUTSIDE = {"conch", "conch.__main__"}
#: What clients and the server share.
SHARED = {
    *("addresses", "client", "config", "errors", "extras", "http2", "inference", "logs"),
    *("temporary", "tensors", "texts", "threads"),
}
#: What every ``model.py`` has to be called.
INTERFACE_NAMES = {"TritonPythonModel"}


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if not path.relative_to(PACKAGE).as_posix().startswith(MODELS))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layers() -> list[str]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [contract] = [one for one in document["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    return [module.strip() for layer in contract["layers"] for module in layer.split("|")]


def test_the_measuring_tools_may_import_the_vocabulary_and_the_client_only() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = document["tool"]["importlinter"]["contracts"]
    [tools] = [contract for contract in contracts if "conch.perf" in contract.get("source_modules", ())]
    named = {*tools["source_modules"], *tools["forbidden_modules"]}
    assert {floor.split(".")[1] for floor in layers()} - {module.split(".")[1] for module in named} == SHARED


def test_every_module_stands_on_a_floor_of_the_layer_contract() -> None:
    floors = layers()
    packages = {floor.rpartition(".")[0] for floor in floors}  # the landings between floors: they hold no code
    outside = {
        module
        for module in map(module_of, sources())
        if module not in packages | OUTSIDE
        and not any(module == floor or module.startswith(f"{floor}.") for floor in floors)
    }
    assert outside == set()


def test_a_class_name_occurs_once() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module_of(path))
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in INTERFACE_NAMES} == {}


def does_nothing(node: ast.FunctionDef) -> bool:
    """Whether ``node`` is a function with an empty body; click's groups, which are decorated, need no body."""
    return not node.decorator_list and all(
        isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for line in node.body
    )


def test_one_function_does_nothing() -> None:
    idle = [
        f"{module_of(path)}.{node.name}"
        for path in sources()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and does_nothing(node)
    ]
    assert idle == ["conch.inference.ignore"]


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_a_module_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"
    assert len(text.splitlines()) <= 500
