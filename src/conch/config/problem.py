"""Errors in a configuration and their positions.

A problem gives the path of its field: field names, and indices into repeated fields, as in ``("input", 1, "dims")``.
Checks are generators of problems; loading stops at the first, ``conch check`` reports all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from conch.core.errors import Code, ConchError

FieldPath = tuple[str | int, ...]


class ConfigError(ConchError):
    """A configuration that cannot be parsed.

    ``line`` and ``column`` count from 1, and are 0 if unknown; ``hint`` suggests a correction.
    """

    def __init__(self, message: str, *, path: str = "", line: int = 0, column: int = 0, hint: str = "") -> None:
        super().__init__(message, Code.INTERNAL)
        self.path = path
        self.line = line
        self.column = column
        self.hint = hint


class Problem(ConchError):
    """An error in a parsed configuration; ``field`` is its position, ``hint`` suggests a correction."""

    def __init__(self, message: str, field: FieldPath = (), *, hint: str = "") -> None:
        super().__init__(message, Code.INVALID_ARG)
        self.field = field
        self.hint = hint


Problems = Iterator[Problem]


def refuse(problems: Iterable[Problem]) -> None:
    """Raise the first problem, if any."""
    for problem in problems:
        raise problem
