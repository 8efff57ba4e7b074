"""Checks of a ``model.py``, which is parsed and never run."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from pathlib import Path

from conch.checks.finding import Finding
from conch.checks.imports import UNREADABLE
from conch.config.reading import read_small
from conch.errors import one_line

#: Methods that a worker calls if a model has them.
_OPTIONAL = ("initialize", "finalize")


def check_python_model(path: Path, *, decoupled: bool | None) -> Iterator[Finding]:
    """Why the file at ``path`` cannot be a Python model; ``decoupled`` is None where the model says it itself."""
    try:
        tree = ast.parse(read_small(path), str(path))
    except OSError as error:
        yield Finding(path, 0, "error", f"cannot be read: {error.strerror}")
        return
    except UNREADABLE as error:
        line, reason = (error.lineno or 0, error.msg) if isinstance(error, SyntaxError) else (0, one_line(error))
        yield Finding(
            path, line, "error", f"not valid Python: {reason}", f"python -m py_compile {path} shows the place"
        )
        return
    model = next(
        (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "TritonPythonModel"), None
    )
    if model is None:
        # It may also be imported or assigned; then its methods are not to be seen from here.
        if "TritonPythonModel" not in _names_bound(tree):
            yield _no_class(path, tree)
        return
    if not model.bases and "execute" not in _names_bound(model):
        yield _no_execute(path, model)
    senders = [call.lineno for call in _calls(tree, "get_response_sender")]
    for method in (node for node in model.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
        if method.name == "execute" and not method.decorator_list:
            yield from _execute_problems(path, method, returns=decoupled is False and not senders)
        elif not model.bases and method.name not in _OPTIONAL:
            for meant in get_close_matches(method.name, _OPTIONAL, n=1, cutoff=0.85):
                yield Finding(path, method.lineno, "warning", f"nothing calls {method.name}", f"rename it {meant}")
    if senders and decoupled is False:
        problem = "the model has a response sender and is not decoupled, so that it may send one response"
        yield Finding(path, senders[0], "warning", problem, "model_transaction_policy { decoupled: true }")


def check_called_models(path: Path, models: Collection[str]) -> Iterator[Finding]:
    """Models that the file at ``path`` calls (BLS) by names that none of ``models`` has."""
    try:
        tree = ast.parse(read_small(path), str(path))
    except UNREADABLE:
        return  # check_python_model reports it
    if _calls(tree, "load_model"):
        return  # it may bring models of its own
    for call in _calls(tree, "InferenceRequest"):
        for argument in call.keywords:
            name = argument.value.value if isinstance(argument.value, ast.Constant) else None
            if argument.arg == "model_name" and isinstance(name, str) and name not in models:
                nearest = get_close_matches(name, models, n=1)
                fix = f"did you mean '{nearest[0]}'?" if nearest else "add it to the repository"
                yield Finding(path, argument.value.lineno, "warning", f"there is no model '{name}' to call", fix)


def _execute_problems(
    path: Path, execute: ast.FunctionDef | ast.AsyncFunctionDef, *, returns: bool
) -> Iterator[Finding]:
    """What is wrong with ``execute``, which ``returns`` its responses or sends them."""
    arguments = execute.args
    if not arguments.vararg and len(arguments.posonlyargs + arguments.args) != 2:
        problem = "execute is called with self and requests"
        yield Finding(path, execute.lineno, "error", problem, "def execute(self, requests)")
    elif returns and not any(  # a body of "..." is a stub
        isinstance(node, (ast.Yield, ast.YieldFrom, ast.Raise))
        or (isinstance(node, ast.Constant) and node.value is ...)
        or (isinstance(node, ast.Return) and node.value)
        for node in ast.walk(execute)
    ):
        yield Finding(path, execute.lineno, "error", "execute returns no responses", "return a list of them")


def _calls(tree: ast.AST, method: str) -> list[ast.Call]:
    """The calls of a method of this name."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == method]


def _no_class(path: Path, tree: ast.Module) -> Finding:
    classes = {node.name: node.lineno for node in tree.body if isinstance(node, ast.ClassDef)}
    nearest = next(iter(get_close_matches("TritonPythonModel", classes, n=1)), "")
    if not nearest and len(classes) == 1:
        [nearest] = classes
    fix = f"rename {nearest}" if nearest else "name the model's class so"
    return Finding(path, classes.get(nearest, 0), "error", "there is no class TritonPythonModel", fix)


def _no_execute(path: Path, model: ast.ClassDef) -> Finding:
    methods = {
        node.name: node.lineno for node in model.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    nearest = next(iter(get_close_matches("execute", methods, n=1, cutoff=0.7)), "")
    fix = f"rename {nearest}" if nearest else "def execute(self, requests)"
    line = methods.get(nearest, model.lineno)
    return Finding(path, line, "error", "TritonPythonModel has no method execute", fix)


def _names_bound(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                names.update(
                    "TritonPythonModel" if alias.name == "*" else alias.asname or alias.name for alias in aliases
                )
    return names
