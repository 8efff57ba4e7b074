"""A fault that ``conch check`` reports, on one line, and where in a file it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from conch.config.reading import shown_name

#: Where a message goes over from what is wrong to what to do.
_ADVICE = re.compile(r"[;:] (?=(?:accept|check|choose|did you mean|give|it has|it must|join|run|set)\b)")


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is wrong.  ``line`` counts from 1; 0 means the whole file or directory.

    ``place`` is what people know ``path`` by, where that is the copy of something in a store.
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
    """The finding for an error of the server's; what its message says to do becomes the fix, else it is ``fix``."""
    problem, *advice = _ADVICE.split(message, maxsplit=1)
    return Finding(path, line, severity, problem, advice[0] if advice else fix)


def line_of(text: str, name: str) -> int:
    """The line (from 1) on which ``name`` first stands between quotation marks."""
    found = re.search(rf"""(["']){re.escape(name)}\1""", text)
    return text.count("\n", 0, found.start()) + 1 if found else 1
