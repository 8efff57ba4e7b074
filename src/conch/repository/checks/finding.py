"""A problem that ``conch check`` reports on one line, with its position in a file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from conch.config.reading import shown_name

#: Matches the separator between the problem and the advice in a message.
_ADVICE = re.compile(r"[;:] (?=(?:accept|check|choose|did you mean|give|it has|it must|join|run|set)\b)")


@dataclass(frozen=True, order=True)
class Finding:
    """One problem.  ``line`` counts from 1; 0 means the whole file or directory.

    ``place`` replaces ``path`` in the output for a copy of a file in a store.
    """

    path: Path
    line: int
    severity: str
    problem: str
    fix: str = ""
    place: str = ""

    def __str__(self) -> str:
        where = f"{self.place or self.path}:{self.line}" if self.line else self.place or str(self.path)
        fix = f" (fix: {self.fix})" if self.fix else ""
        return shown_name(f"{where}: {self.severity}: {' '.join(self.problem.split())}{fix}")


def with_fix(path: Path, line: int, severity: str, message: str, fix: str = "") -> Finding:
    """Return a finding for a server error; advice in the message becomes the fix, otherwise ``fix`` is used."""
    problem, *advice = _ADVICE.split(message, maxsplit=1)
    return Finding(path, line, severity, problem, advice[0] if advice else fix)


def line_of(text: str, name: str) -> int:
    """Return the first line (from 1) with ``name`` in quotation marks."""
    match = re.search(rf"""(["']){re.escape(name)}\1""", text)
    return text.count("\n", 0, match.start()) + 1 if match else 1
