"""The jinja2 sandbox of chat templates. Imported when the first template is compiled.

jinja2's sandbox prevents access to Python, but allows unlimited nested loops, multiplied texts and nested lists. This
one therefore charges for processor time in every loop iteration, and for the size of a text before every operation that
enlarges it. Limits apply per thread.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from time import thread_time
from types import BuiltinMethodType
from typing import Any, Final

import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes, pass_context
from jinja2.visitor import NodeTransformer

#: The maximum number of characters in one text, and in all texts of a rendering.
MAX_TEXT: Final = 64 << 20
MAX_ALL_TEXT: Final = 1 << 30
#: The number of characters that an element of a list counts as.
_ELEMENT: Final = 8
#: Python's ``strftime`` allocates up to this many times the length of its format, which may contain any width.
_STRFTIME: Final = 256


class TooMuch(Exception):
    """A rendering exceeds a limit; the message names the limit."""


class _Rendering(threading.local):
    """The limits of the calling thread's rendering.

    ``end`` is a deadline in the thread's processor time; ``left`` is the remaining number of characters.
    """

    end = float("inf")
    seconds = float("inf")
    left = MAX_ALL_TEXT


_rendering: Final = _Rendering()


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Limit the rendering of the calling thread within the context; ``seconds`` are of processor time."""
    _rendering.seconds, _rendering.end, _rendering.left = seconds, thread_time() + seconds, MAX_ALL_TEXT
    try:
        yield
    finally:
        _rendering.end, _rendering.left = float("inf"), MAX_ALL_TEXT


def tick() -> None:
    """Raise :class:`TooMuch` if the processor time is exhausted."""
    if thread_time() > _rendering.end:
        raise TooMuch(
            f"it takes more than {_rendering.seconds:g} seconds of processor time (parameter 'chat_template_timeout')"
        )


def charge(characters: float) -> None:
    """Charge for a text before it is created. Raises :class:`TooMuch` if it exceeds a limit."""
    _rendering.left -= characters  # type: ignore[assignment]
    if characters > MAX_TEXT or _rendering.left < 0:
        raise TooMuch(f"it creates texts of more than {MAX_TEXT} characters, or {MAX_ALL_TEXT} in total")
    tick()


def size_of(value: Any) -> int:
    """Estimate the number of characters of ``value`` as text; a nested list counts at each occurrence."""
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | dict | set):
        return _ELEMENT
    size, waiting = 0, [value]
    while waiting and size <= MAX_TEXT:
        container = waiting.pop()
        elements = [*container, *container.values()] if isinstance(container, dict) else container
        size += _ELEMENT * (1 + len(elements))
        for element in elements:
            if isinstance(element, str | bytes):
                size += len(element)
            elif isinstance(element, list | tuple | dict | set):
                waiting.append(element)
    return size


def charge_product(left: Any, right: Any) -> None:
    """Charge for ``left * right``: a repeated text or list, or a number."""
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(many, str | bytes | list | tuple):
            charge(len(many) * max(times, 0) * (1 if isinstance(many, str | bytes) else _ELEMENT))
    if isinstance(left, int) and isinstance(right, int):
        charge((left.bit_length() + right.bit_length()) / _ELEMENT)


def charge_power(left: Any, right: Any) -> None:
    """Raise :class:`TooMuch` if ``left ** right`` is a huge integer, which is slow to compute."""
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 1 << 16:
        raise TooMuch("it computes a number of more than 65536 bits")


def charge_sum(left: Any, right: Any) -> None:
    """Charge for ``left + right`` of texts or lists."""
    if isinstance(left, str) and isinstance(right, str):
        charge(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        charge(_ELEMENT * (len(left) + len(right)))


#: Names of filters that only this module adds to templates; a template cannot use them because of the space.
_TICK: Final = "take time"
_JOINED: Final = "join texts"

#: Methods whose first argument determines the length of the result.
_WIDTHS: Final = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"})
#: Filters with numeric arguments that determine the size of the result, or an exponent of ten.
_NUMBERS: Final = ("batch", "center", "indent", "round", "slice", "truncate", "wordwrap")
_MAX_NUMBER: Final = 10_000
#: Matches the widths and precisions in formats of ``%`` and ``str.format``.
_WIDTH: Final = re.compile(
    r"%(?:\([^)]*\))?[-#0 +]*(\d+|\*)?(?:\.(\d+|\*))?"
    r"|\{[^{}:]*:[^{}\d]*(\d+|\{)?(?:[^{}\d]*(\d+|\{))?"
)
_MAX_WIDTH_DIGITS: Final = 4


class Bounding(NodeTransformer):
    """Instruments the syntax tree of a template to limit its processor time and the size of its texts."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, _tick(node))
        if node.test is not None:
            passed = _filter(nodes.Const(True), _TICK, node)
            node.test = nodes.And(passed, node.test).set_lineno(node.lineno).set_environment(node.environment)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self.generic_visit(node)
        node.body.insert(0, _tick(node))
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:
        self.generic_visit(node)
        if node.node is not None and not isinstance(node.node, nodes.Const):
            node.node = _filter(node.node, _TICK, node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), _JOINED, node)


def _tick(node: nodes.Node) -> nodes.Stmt:
    statement = nodes.ExprStmt(_filter(nodes.Const(None), _TICK, node))
    return statement.set_lineno(node.lineno).set_environment(node.environment)


def _filter(value: nodes.Expr, name: str, node: nodes.Node) -> nodes.Filter:
    filter_node = nodes.Filter(value, name, [], [], None, None)
    return filter_node.set_lineno(node.lineno).set_environment(node.environment)


@pass_context  # type: ignore[untyped-decorator]  # prevents evaluation when the template is compiled
def _ticking(context: Any, value: Any) -> Any:
    tick()
    return value


@pass_context  # type: ignore[untyped-decorator]
def _joined(context: Any, values: Sequence[Any]) -> str:
    """Concatenate values: the operator ``~``, with limits."""
    charge(sum(map(size_of, values)))
    return "".join(map(str, values))


def bounded_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return limited versions of jinja2's filters that enlarge values, and the filters that :class:`Bounding` adds."""
    numbers = {name: _with_small_numbers(name, filters[name]) for name in _NUMBERS}
    return {
        _TICK: _ticking,
        _JOINED: _joined,
        **numbers,
        "format": _weighed(filters["format"], lambda form, *values, **named: format_size(form, (*values, named))),
        "join": _join(filters["join"]),
        "pprint": _weighed(filters["pprint"], size_of),
        "replace": _replace(filters["replace"]),
        "string": _weighed(filters["string"], size_of),
        "sum": _sum(filters["sum"]),
    }


def check_call(called: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Charge for the result of a method of a text or number before the call. Raises :class:`TooMuch`."""
    tick()
    name = getattr(called, "__name__", "")
    own = getattr(called, "__self__", None)
    if name in ("format", "format_map"):
        # jinja2 replaces the method by a wrapper, which keeps the original as ``__wrapped__``.
        form = getattr(getattr(called, "__wrapped__", called), "__self__", "")
        charge(format_size(form, (*args, kwargs)))
    if not isinstance(called, BuiltinMethodType) or not isinstance(own, str | bytes | int):
        return
    if name in _WIDTHS:
        for number in (*args[:1], *kwargs.values()):
            charge((len(own) if name == "expandtabs" else 1) * number if isinstance(number, int) else 0)  # type: ignore[arg-type]
    elif name == "replace" and len(args) > 1 and isinstance(own, str):
        charge(_replaced_size(own, args[0], args[1]))
    elif name == "join" and isinstance(own, str) and args and isinstance(args[0], list | tuple | dict):
        charge(_joined_size(own, args[0]))
    elif name == "translate":
        raise TooMuch("it calls translate")


def format_size(form: Any, values: Any) -> float:
    """Return an upper bound of the characters of a formatted text.

    The sum of the format's length, all values once per placeholder, and all widths.
    """
    text = str(form)
    widths = [width for groups in _WIDTH.findall(text) for width in groups if width]
    if not all(width.isdigit() and len(width) <= _MAX_WIDTH_DIGITS for width in widths):
        raise TooMuch("it has a format with a width of more than four digits, or a width from an argument")
    placeholders = text.count("{") + text.count("%")
    return float(len(text) + placeholders * size_of(values) + sum(map(int, widths)))


def _with_small_numbers(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        for number in (*args, *kwargs.values()):
            # The filtered value may be any number; the other arguments of these filters are always small.
            if number is not args[0] and type(number) is int and abs(number) > _MAX_NUMBER:
                raise TooMuch(f"it gives filter '{name}' a number of more than {_MAX_NUMBER}")
        return filter(*args, **kwargs)

    return bounded


def _weighed(filter: Callable[..., Any], size: Callable[..., float]) -> Callable[..., Any]:
    @functools.wraps(filter)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        charge(size(*args, **kwargs))
        return filter(*args, **kwargs)

    return bounded


def _join(filter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter)
    def bounded(context: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> Any:
        values = list(value)
        charge(_joined_size(str(d), values))
        return filter(context, values, d, attribute)

    return bounded


def _replace(filter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter)
    def bounded(context: Any, s: Any, old: Any, new: Any, count: Any = None) -> Any:
        charge(_replaced_size(str(s), str(old), str(new)))
        return filter(context, s, old, new, count)

    return bounded


def _sum(filter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(filter)
    def bounded(environment: Any, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, int | float):
            raise TooMuch("it adds values that are not numbers")
        return filter(environment, iterable, attribute, start)

    return bounded


def _replaced_size(text: str, old: Any, new: Any) -> int:
    if not isinstance(old, str) or not isinstance(new, str):
        return 0
    return len(text) + text.count(old) * max(0, len(new) - len(old))


def _joined_size(separator: str, values: Any) -> int:
    return sum(map(size_of, values)) + len(separator) * len(values)


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}``, which marks text for training; rendering treats it as a plain block."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Any) -> Any:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` for templates; rejects names with a leading underscore, which are Python's internal names."""

    def __init__(*arguments: Any, **values: Any) -> None:
        self, *mappings = arguments  # allows ``self`` as a keyword
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
    """``dict`` for templates: creates dictionaries without exposing the attributes of a type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    charge(_STRFTIME * len(form))
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Convert a value to JSON, without the HTML escapes of jinja2's own filter."""
    charge(size_of(value) * (1 + (len(indent) if isinstance(indent, str) else indent or 0)))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with limits of processor time and text size."""

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
        """Join the pieces of output of a template, macro or block."""
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
    """Charge for the value of an expression before it is output."""
    if not isinstance(value, str):
        charge(size_of(value))
    return value


@cache
def environment() -> Any:
    """Return the sandbox that all templates share; templates can change neither it nor their variables."""
    sandbox: Any = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], finalize=_written
    )
    sandbox.filters |= bounded_filters(sandbox.filters)
    sandbox.filters["tojson"] = _tojson
    del sandbox.globals["lipsum"]
    sandbox.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return sandbox
