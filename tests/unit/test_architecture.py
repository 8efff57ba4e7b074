"""The shape of the house, as ARCHITECTURE.md and pyproject.toml describe it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "conch"
#: Repositories, templates and backends in Python hold models, which are no modules of ours.
MODELS = ("backends/shipped/", "cli/demo/repository/", "cli/templates/", "convert/templates/")
#: Modules that import everything, or nothing.
OUTSIDE = {"conch", "conch.__main__"}
#: What clients and the server share.
SHARED = {"client", "config", "core", "http2", "options"}
#: Tests whose event loop, network and threads take the place of asyncio's, which offers no public interface for that.
SIMULATION = ROOT / "tests" / "simulation"
#: Names with an underscore that the standard library documents.
DOCUMENTED = {"_exit"}
#: Functions that take the name of an attribute as text.
TAKE_NAMES = {"getattr", "hasattr", "setattr", "delattr", "patch", "object"}
#: What every file with a private name of another object has; parsing all files would take seconds.
MAY_BE_PRIVATE = re.compile(
    r"""(?<!self)(?<!cls)(?<!super\(\))\._[A-Za-z]|import [^\n]*\b_[A-Za-z]|["'][\w.]*\b_[A-Za-z]|^ *_\w+,$""",
    re.MULTILINE,
)
#: What every ``model.py`` has to be called.
INTERFACE_NAMES = {"TritonPythonModel"}


class Outline(NamedTuple):
    """What a source file says and defines; ``idle`` are its functions that do nothing."""

    lines: int
    documented: bool
    classes: list[str]
    idle: list[str]


@cache
def outlines() -> dict[str, Outline]:
    """The outline of each source file by its module; syntax trees of all files would take too much memory."""
    return {module_of(path): outline(path.read_text()) for path in sources()}


def outline(text: str) -> Outline:
    tree = ast.parse(text)
    return Outline(
        len(text.splitlines()),
        not tree.body or ast.get_docstring(tree) is not None,
        [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)],
        [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and does_nothing(node)],
    )


@cache
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
    [tools] = [contract for contract in contracts if "conch.measure" in contract.get("source_modules", ())]
    packages = {module for module in (*tools["source_modules"], *tools["forbidden_modules"]) if module.count(".") == 1}
    assert {floor.split(".")[1] for floor in layers()} - {package.split(".")[1] for package in packages} == SHARED


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


def test_the_first_level_has_at_most_twenty_packages() -> None:
    packages = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    assert len(packages) <= 20, packages


def test_a_class_name_occurs_once() -> None:
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for module, outline in outlines().items():
        for name in outline.classes:
            modules[name].append(module)
    assert {name: where for name, where in modules.items() if len(where) > 1 and name not in INTERFACE_NAMES} == {}


def does_nothing(node: ast.FunctionDef) -> bool:
    """Whether ``node`` is a function with an empty body; click's groups, which are decorated, need no body."""
    return not node.decorator_list and all(
        isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for line in node.body
    )


def test_one_function_does_nothing() -> None:
    idle = [f"{module}.{name}" for module, outline in outlines().items() for name in outline.idle]
    assert idle == ["conch.core.inference.ignore"]


def test_a_module_says_what_it_is_for_in_at_most_800_lines() -> None:
    assert [module for module, outline in outlines().items() if not outline.documented] == []
    assert [module for module, outline in outlines().items() if outline.lines > 800] == []


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.startswith("__") and name not in DOCUMENTED


def is_own(node: ast.expr) -> bool:
    """Whether an expression is ``self``, ``cls`` or ``super()``."""
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def private_names(node: ast.AST) -> list[str]:
    """Return the private names of other objects and modules that ``node`` reads, replaces or imports."""
    match node:
        case ast.Attribute(value, name) if not is_own(value):
            names = [name]
        case ast.Import(aliases):
            names = [part for alias in aliases for part in alias.name.split(".")]
        case ast.ImportFrom(module, aliases):
            names = [*(module or "").split("."), *(alias.name for alias in aliases)]
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name), arguments) if name in TAKE_NAMES:
            texts = [one.value for one in arguments if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            names = [part for text in texts if " " not in text for part in text.split(".")]
        case _:
            names = []
    return [name for name in names if is_private(name)]


def test_tests_use_public_names_only() -> None:
    paths = [path for path in (ROOT / "tests").rglob("*.py") if SIMULATION not in path.parents]
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}": names
        for path in paths
        if not path.name.endswith("_pb2.py") and MAY_BE_PRIVATE.search(text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute | ast.Import | ast.ImportFrom | ast.Call) and (names := private_names(node))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("server.queue._waiting", ["_waiting"]),
        ("self.server._queue.clear()", ["_queue"]),
        ("from conch.server import _limit", ["_limit"]),
        ("import conch._secret", ["_secret"]),
        ("monkeypatch.setattr(module, '_LIMIT', 2)", ["_LIMIT"]),
        ("monkeypatch.setattr('conch.server._limit', 2)", ["_limit"]),
        ("self._queue, cls._made, super()._run()", []),
        ("os._exit(1); queue.__len__(); _ = answer", []),
    ],
)
def test_private_names_are_those_of_other_objects(code: str, names: list[str]) -> None:
    assert [name for node in ast.walk(ast.parse(code)) for name in private_names(node)] == names


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/internals.md"])
def test_a_page_names_modules_that_exist(page: str) -> None:
    named = set(re.findall(r"(?<![\w/-])(?:[a-z_0-9]+/)+[a-z_0-9]+\.py\b", (ROOT / page).read_text()))
    paths = [path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("[bdt]*s/**/*.py")]]
    assert {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in paths)} == set()
