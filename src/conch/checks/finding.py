"""A fault that ``conch check`` reports, on one line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is wrong.  ``line`` counts from 1; 0 means the whole file or directory."""

    path: Path
    line: int
    severity: str
    problem: str
    fix: str = ""

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else str(self.path)
        fix = f" (fix: {self.fix})" if self.fix else ""
        return f"{where}: {self.severity}: {' '.join(self.problem.split())}{fix}"
