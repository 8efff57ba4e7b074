"""Checks of a ``model.py``, which is parsed and never run.

Its imports are found in the syntax tree. Imports inside ``try`` with ``except ImportError`` or inside ``if`` are
omitted, because the source may work without them.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar

from conch.config.reading import read_small
from conch.core.errors import did_you_mean, nearest, one_line
from conch.repository.checks.finding import Finding

#: Exceptions whose handlers also catch a failed import.
_CAUGHT: Final = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
#: Exceptions that Python raises for an unreadable source file.
UNREADABLE: Final = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)
#: Methods of a model that the server always calls.
_CALLED: Final = frozenset({"__init__", "initialize", "execute", "finalize", "auto_complete_config"})


@dataclass(frozen=True, slots=True)
class Imported:
    """A module that a source imports at ``line``.

    ``name`` is the full dotted name; ``level`` the number of leading dots of a relative import. ``certain`` means that
    the import always runs when the model does, not only when some function is called.
    """

    name: str
    line: int
    level: int = 0
    certain: bool = True

    @property
    def top(self) -> str:
        """The first part of the name, with which finders are called."""
        return self.name.partition(".")[0]


def imports_of(tree: ast.Module) -> list[Imported]:
    """Return the unguarded imports in source order."""
    return list(_in_statements(tree.body, certain=True))


def changes_path(tree: ast.Module) -> bool:
    """Return whether the source may change ``sys.path``, which makes missing imports uncertain."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "path"
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
        for node in ast.walk(tree)
    )


def _in_statements(statements: Iterable[ast.stmt], certain: bool) -> Iterator[Imported]:
    for statement in statements:
        match statement:
            case ast.Import(names=aliases):
                yield from (Imported(alias.name, statement.lineno, 0, certain) for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                names = [module] if module else [alias.name for alias in aliases]
                yield from (Imported(name, statement.lineno, level, certain) for name in names)
            case ast.FunctionDef(name=name, body=body) | ast.AsyncFunctionDef(name=name, body=body):
                yield from _in_statements(body, certain and name in _CALLED)
            case ast.ClassDef(body=body) | ast.For(body=body) | ast.While(body=body):
                yield from _in_statements(body, certain)
            case ast.With(items=items, body=body):
                if not any(map(_suppresses, items)):
                    yield from _in_statements(body, certain)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody):
                if not any(map(_catches, handlers)):
                    yield from _in_statements([*body, *orelse], certain)
                yield from _in_statements(finalbody, certain)


def _suppresses(item: ast.withitem) -> bool:
    """Return whether this is ``contextlib.suppress(…)``, with any prefix."""
    match item.context_expr:
        case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress")):
            return True
    return False


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(node, ast.Name) and node.id in _CAUGHT for node in caught)


N = TypeVar("N", bound=ast.AST)

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Methods that a worker calls if the model defines them.
_OPTIONAL = ("initialize", "finalize")
#: Functions and attributes that can change names without mentioning them.
_DYNAMIC_FUNCTIONS: Final = frozenset({"delattr", "eval", "exec", "globals", "locals", "setattr", "vars"})
_DYNAMIC_ATTRIBUTES: Final = frozenset({"__dict__", "__getattribute__", "__setattr__"})


def read_python_model(path: Path) -> ast.Module | Finding:
    """Parse the Python model at ``path``; returns an error if it cannot be read."""
    try:
        return ast.parse(read_small(path), str(path))
    except OSError as error:
        return Finding(path, 0, "error", f"cannot be read: {error.strerror}")
    except UNREADABLE as error:
        line, reason = (error.lineno or 0, error.msg) if isinstance(error, SyntaxError) else (0, one_line(error))
        return Finding(
            path, line, "error", f"not valid Python: {reason}", f"python -m py_compile {path} shows the position"
        )


def check_python_model(path: Path, tree: ast.Module, *, decoupled: bool | None) -> Iterator[Finding]:
    """Yield errors in the Python model at ``path``; ``decoupled`` is None if the model itself sets it."""
    model = next((node for node in _of_type(tree, ast.ClassDef) if node.name == "TritonPythonModel"), None)
    if model is None:
        # An imported or assigned class has methods that are not visible here.
        if not _names_bound(tree).keys() & {"TritonPythonModel", "*"}:
            yield _no_class(path, tree)
        return
    if not model.bases and "execute" not in _names_bound(model):
        yield _no_execute(path, model)
    senders = [call.lineno for call in _calls(tree, "get_response_sender")]
    for method in _methods(model):
        if method.name == "execute" and not method.decorator_list:
            yield from _execute_problems(path, method, returns=decoupled is False and not senders)
        elif not model.bases and method.name not in _OPTIONAL and (near := nearest(method.name, _OPTIONAL, 0.85)):
            yield Finding(path, method.lineno, "warning", f"nothing calls {method.name}", f"rename it {near}")
    if senders and decoupled is False:
        problem = "the model has a response sender but is not decoupled, so it may send only one response"
        yield Finding(path, senders[0], "warning", problem, "model_transaction_policy { decoupled: true }")


def check_called_models(path: Path, tree: ast.Module, models: Collection[str]) -> Iterator[Finding]:
    """Yield names in BLS calls of the file at ``path`` that are not in ``models``."""
    if _calls(tree, "load_model"):
        return  # it may load models with its own files
    constants = _StringConstants(tree)
    for call in _calls(tree, "InferenceRequest"):
        for argument in call.keywords:
            name = constants.text(argument.value) if argument.arg == "model_name" else None
            if name is not None and name not in models:
                fix = did_you_mean(name, models, "add it to the repository")
                yield Finding(path, argument.value.lineno, "warning", f"there is no model '{name}' to call", fix)


class _StringConstants:
    """The string constants of a module.

    A name is one if the module binds it once, in its body; an attribute is one if a class without bases binds it once,
    in its own body or in that of ``initialize``.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._names: dict[str, str] = {}
        #: The texts of attributes, by the nodes that read them.
        self._attributes: dict[ast.expr, str] = {}
        attributes = _of_type(tree, ast.Attribute)
        bound = _names_bound(tree)
        if (
            "*" in bound
            or any(node.id in _DYNAMIC_FUNCTIONS for node in _of_type(tree, ast.Name))
            or any(node.attr in _DYNAMIC_ATTRIBUTES for node in attributes)
        ):
            return
        self._names = {name: text for name, text in _assigned(tree.body) if bound[name] == 1}
        changed = Counter(node.attr for node in attributes if not isinstance(node.ctx, ast.Load))
        for model in _of_type(tree, ast.ClassDef):
            if _is_plain(model):
                self._add_attributes(model, changed)

    def text(self, value: ast.expr) -> str | None:
        """The string that an expression always has; None if it may have another value."""
        match value:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name):
                return self._names.get(name)
        return self._attributes.get(value)

    def _add_attributes(self, model: ast.ClassDef, changed: Counter[str]) -> None:
        """Add the attributes of a class's instances; ``changed`` counts the changes of attributes, by name."""
        bound = Counter(changed)
        for statement in model.body:
            bound.update([statement.name] if isinstance(statement, _FUNCTIONS) else _names_bound(statement))
        starts = [
            method.body for method in _methods(model) if method.name == "initialize" and not method.decorator_list
        ]
        texts = dict(chain(_assigned(model.body), *(_assigned(body, "self") for body in starts)))
        for node in _of_type(model, ast.Attribute):
            if _is_name(node.value, "self", model.name) and bound[node.attr] == 1 and node.attr in texts:
                self._attributes[node] = texts[node.attr]


def _assigned(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, str]]:
    """The strings that the statements of ``body`` assign to names, or to attributes of ``owner``."""
    for statement in body:
        match statement:
            case ast.Assign(targets=targets, value=ast.Constant(value=str(text))):
                pass
            case ast.AnnAssign(target=only, value=ast.Constant(value=str(text))):
                targets = [only]
            case _:
                continue
        for target in targets:
            match target:
                case ast.Name(id=name) if not owner:
                    yield name, text
                case ast.Attribute(value=ast.Name(id=of), attr=name) if of == owner:
                    yield name, text


def _is_plain(model: ast.ClassDef) -> bool:
    """Return whether only the class's own methods, as ``self``, can access its instances."""
    if model.bases or model.keywords or model.decorator_list:
        return False
    takes_self = sum(method.args.args[:1] != [] and method.args.args[0].arg == "self" for method in _methods(model))
    return (
        takes_self == sum(argument.arg == "self" for argument in _of_type(model, ast.arg))
        # otherwise the instance is passed elsewhere, where its attributes may be set
        and sum(_is_name(node.value, "self") for node in _of_type(model, ast.Attribute))
        == sum(_is_name(node, "self") for node in _of_type(model, ast.Name))
    )


def _methods(model: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in model.body if isinstance(node, _FUNCTIONS)]


def _is_name(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _of_type(tree: ast.AST, kind: type[N]) -> list[N]:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def _execute_problems(
    path: Path, execute: ast.FunctionDef | ast.AsyncFunctionDef, *, returns: bool
) -> Iterator[Finding]:
    """Yield errors in ``execute``; ``returns`` is whether it must return its responses instead of sending them."""
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
    """Return the calls of a method with this name."""
    return [
        call for call in _of_type(tree, ast.Call) if isinstance(call.func, ast.Attribute) and call.func.attr == method
    ]


def _no_class(path: Path, tree: ast.Module) -> Finding:
    classes = {node.name: node.lineno for node in tree.body if isinstance(node, ast.ClassDef)}
    near = nearest("TritonPythonModel", classes)
    if not near and len(classes) == 1:
        [near] = classes
    fix = f"rename {near}" if near else "rename the model's class to TritonPythonModel"
    return Finding(path, classes.get(near, 0), "error", "the class TritonPythonModel is missing", fix)


def _no_execute(path: Path, model: ast.ClassDef) -> Finding:
    methods = {method.name: method.lineno for method in _methods(model)}
    near = nearest("execute", methods, 0.7)
    fix = f"rename {near}" if near else "def execute(self, requests)"
    line = methods.get(near, model.lineno)
    return Finding(path, line, "error", "TritonPythonModel has no method execute", fix)


def _names_bound(tree: ast.AST) -> Counter[str]:
    """Count the bindings of each name below ``tree``, in any scope; ``*`` means a star import."""
    names: Counter[str] = Counter()
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=str(name))
                | ast.AsyncFunctionDef(name=str(name))
                | ast.ClassDef(name=str(name))
                | ast.Name(id=name, ctx=ast.Store() | ast.Del())
                | ast.arg(arg=name)
                | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                names[name] += 1
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                names.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
    return names
