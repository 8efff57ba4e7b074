"""The result of comparing one architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: ``exact``: the results are those of transformers. ``differs``: they are not. ``refused``: the model does not become
#: ready, with a reason. ``fails``: a request fails, but not in transformers. ``none``: there is no reference, because
#: no checkpoint can be created or transformers itself fails.
Verdict = Literal["exact", "differs", "refused", "fails", "none"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict, and the reason in one line."""

    verdict: Verdict
    reason: str = ""
