"""Checks the arguments of ``triton_python_backend_utils``; raises TypeError where Triton does.

Runs in the worker of a Python model.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeVar

Kind = TypeVar("Kind")

#: Ranges of C integer types.
UINT32 = range(1 << 32)
UINT64 = range(1 << 64)
INT64 = range(-(1 << 63), 1 << 63)


def integer(value: Any, what: str, within: range) -> int:
    """Convert ``value`` to an integer in a range; ``what`` names the argument in the message."""
    number = operator.index(value) if hasattr(value, "__index__") else None
    if number is None or number not in within:
        raise TypeError(f"{what} must be an integer from {within.start} to {within.stop - 1}, not {value!r}")
    return number


def text(value: Any, what: str) -> str:
    """Return a str, or decode bytes as UTF-8."""
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value)}")
    return value


def truth(value: Any, what: str) -> bool:
    """Convert ``value`` to a bool; accepts numbers, but not text or None."""
    if value is None or not hasattr(value, "__bool__"):
        raise TypeError(f"{what} must be a bool, not {type(value)}")
    return bool(value)


def items(values: Any, what: str, kind: type | tuple[type, ...], name: str) -> list[Any]:
    """Return the items of a sequence (not text) after checking that each is a ``kind``; ``name`` denotes the kind."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise TypeError(f"{what} must be a list of {name}, not {type(values)}")
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{what} must be a list of {name}, with a {type(value)} in it")
    return list(values)


def instance(value: Any, what: str, kind: type[Kind]) -> Kind:
    """Return ``value`` after checking that it is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{what} must be a {kind.__name__}, not {value!r}")
    return value
