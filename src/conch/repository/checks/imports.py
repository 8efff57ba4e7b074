"""Finds the imports in a Python source, and which of them always run, from the syntax tree.

Imports inside ``try`` with ``except ImportError`` or inside ``if`` are omitted, because the source may work without
them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

#: Exceptions whose handlers also catch a failed import.
_CAUGHT: Final = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
#: Exceptions that Python raises for an unreadable source file.
UNREADABLE: Final = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)
#: Methods of a model that the server always calls.
_CALLED: Final = frozenset({"__init__", "initialize", "execute", "finalize", "auto_complete_config"})


@dataclass(frozen=True, slots=True)
class Imported:
    """A module that a source imports at ``line``.

    ``name`` is the full dotted name; ``level`` the number of leading dots of a relative import.  ``certain`` means that
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
