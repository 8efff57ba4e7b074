"""What a comparison of one architecture found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: ``exact``: conch answers as transformers does.  ``differs``: it answers otherwise.  ``refused``: it does not become
#: ready, and says why.  ``fails``: a request fails that transformers answers.  ``none``: there is nothing to compare
#: with, since no checkpoint can be made or transformers itself fails.
Verdict = Literal["exact", "differs", "refused", "fails", "none"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict, and the reason in one line."""

    verdict: Verdict
    reason: str = ""
