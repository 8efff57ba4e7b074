"""How the answers of a converted variant differ from the checkpoint's, text by text, as ``conch.json`` keeps it.

Pure.  ``conch convert`` writes it for people; nothing that serves reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Contrast:
    """One text, what the checkpoint answers and what the variant does, in words; ``cosine`` of the two answers (None
    where that says nothing)."""

    text: str
    reference: str
    variant: str
    difference: float
    cosine: float | None = None


@dataclass(frozen=True, slots=True)
class Contrasts:
    """``differences`` of single texts or tokens, in order, a sample of at most some hundred that keeps their
    distribution; ``measure`` says what they are.  ``worst`` are the texts with the largest, the worst first."""

    measure: str
    differences: tuple[float, ...]
    worst: tuple[Contrast, ...]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Contrasts:
        """The contrasts of a manifest; raises what Python raises for a wrong shape."""
        worst = tuple(
            Contrast(
                str(one["text"]), str(one["reference"]), str(one["variant"]), float(one["difference"]),
                None if one.get("cosine") is None else float(one["cosine"]),
            )
            for one in document["worst"]
        )  # fmt: skip
        return cls(str(document["measure"]), tuple(map(float, document["differences"])), worst)
