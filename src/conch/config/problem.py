"""Faults of a configuration: what is wrong, and where.

A problem names the field by its path: field names, and indices into repeated fields, as in
``("input", 1, "dims")``.  Checks are generators of problems; loading stops at the first one,
``conch check`` reports them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from conch.errors import Code, ConchError

FieldPath = tuple[str | int, ...]


class ConfigError(ConchError):
    """A configuration that cannot be read.

    ``line`` and ``column`` count from 1 and are 0 where unknown; ``hint`` says what was probably meant.
    """

    def __init__(self, message: str, *, path: str = "", line: int = 0, column: int = 0, hint: str = "") -> None:
        super().__init__(message, Code.INTERNAL)
        self.path = path
        self.line = line
        self.column = column
        self.hint = hint


class Problem(ConchError):
    """A configuration that can be read and is wrong; ``field`` is where, ``hint`` what to do about it."""

    def __init__(self, message: str, field: FieldPath = (), *, hint: str = "") -> None:
        super().__init__(message, Code.INVALID_ARG)
        self.field = field
        self.hint = hint


Problems = Iterator[Problem]


def refuse(problems: Iterable[Problem]) -> None:
    """Raise the first of the problems, if there is one."""
    for problem in problems:
        raise problem
