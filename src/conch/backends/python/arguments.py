"""Checks of the arguments that models give to ``triton_python_backend_utils``: what Triton refuses with a TypeError.

Runs in the worker of a Python model.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeVar

Kind = TypeVar("Kind")

#: The ranges of C's integers.
UINT32 = range(1 << 32)
UINT64 = range(1 << 64)
INT64 = range(-(1 << 63), 1 << 63)


def integer(value: Any, what: str, within: range) -> int:
    """``value`` as an integer of a range; ``what`` names it in the message."""
    number = operator.index(value) if hasattr(value, "__index__") else None
    if number is None or number not in within:
        raise TypeError(f"{what} must be an integer from {within.start} to {within.stop - 1}, not {value!r}")
    return number


def text(value: Any, what: str) -> str:
    """``value`` as text; bytes are UTF-8."""
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value)}")
    return value


def truth(value: Any, what: str) -> bool:
    """``value`` as a bool; a number will do, text and None will not."""
    if value is None or not hasattr(value, "__bool__"):
        raise TypeError(f"{what} must be a bool, not {type(value)}")
    return bool(value)


def items(values: Any, what: str, kind: type | tuple[type, ...], name: str) -> list[Any]:
    """The items of a list or another sequence that is not text, each of a ``kind`` that ``name`` names."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise TypeError(f"{what} must be a list of {name}, not {type(values)}")
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{what} must be a list of {name}, with a {type(value)} in it")
    return list(values)


def instance(value: Any, what: str, kind: type[Kind]) -> Kind:
    """``value``, which must be an object of that class."""
    if not isinstance(value, kind):
        raise TypeError(f"{what} must be a {kind.__name__}, not {value!r}")
    return value
