"""jinja2 as chat templates expect it.  Imported when the first template is compiled."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from functools import cache
from typing import Any

import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

from conch.checkpoints.tokenizers.chat_bounds import Bounding, bounded_filters, check_call, format_size
from conch.checkpoints.tokenizers.chat_limits import (
    MAX_TEXT,
    charge,
    charge_power,
    charge_product,
    charge_sum,
    size_of,
)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what a model is trained to write; for rendering it is a block like any other."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Any) -> Any:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` for templates, which keeps no name that begins with an underscore: Python's own do."""

    def __init__(*given: Any, **values: Any) -> None:
        self, *mappings = given  # so that ``self`` can be among the names
        attributes = dict(*mappings, **values)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.sandbox.SecurityError(
            f"a namespace cannot have the name {name!r}, which begins with an underscore"
        )


class _Dict:
    """``dict`` for templates: it makes dictionaries, and has none of a type's attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the escapes for HTML that jinja2's own filter makes."""
    charge(size_of(value) * (1 + (len(indent) if isinstance(indent, str) else indent or 0)))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with limits to how long a template takes and how much text it makes (``chat_limits.py``)."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+":
                charge_sum(left, right)
            case "*":
                charge_product(left, right)
            case "**":
                charge_power(left, right)
            case "%" if isinstance(left, str):
                charge(format_size(left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        check_call(called, args, kwargs)
        return super().call(context, called, *args, **kwargs)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The pieces that a template, a macro or a block writes, as one text."""
        size, kept = 0, []
        for piece in pieces:
            kept.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                break
        charge(size)
        return "".join(kept)

    def _parse(self, *source: Any) -> Any:
        return Bounding().visit(super()._parse(*source))


def _written(value: Any) -> Any:
    """What stands in a template to be written, once it has been weighed."""
    if not isinstance(value, str):
        charge(size_of(value))
    return value


@cache
def environment() -> Any:
    """The sandbox that all templates share; they cannot change it, nor what they are given."""
    made: Any = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], finalize=_written
    )
    made.filters |= bounded_filters(made.filters)
    made.filters["tojson"] = _tojson
    del made.globals["lipsum"]
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return made
