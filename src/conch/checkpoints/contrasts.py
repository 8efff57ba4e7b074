"""Differences between the outputs of a converted variant and the checkpoint for single texts, stored in ``conch.json``.

``conch convert`` writes them for the user; the server does not read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Contrast:
    """A text with descriptions of the checkpoint's and the variant's output.

    ``cosine`` is the similarity of the two outputs, None if not meaningful.
    """

    text: str
    reference: str
    variant: str
    difference: float
    cosine: float | None = None


@dataclass(frozen=True, slots=True)
class Contrasts:
    """The differences of a variant.

    ``differences`` is a sorted sample of a few hundred values, of texts or tokens, with the original distribution;
    ``measure`` describes them. ``worst`` has the texts with the largest differences, the worst first.
    """

    measure: str
    differences: tuple[float, ...]
    worst: tuple[Contrast, ...]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Contrasts:
        """Parse the contrasts of a manifest. Raises built-in exceptions for an invalid structure."""
        worst = tuple(
            Contrast(
                str(entry["text"]), str(entry["reference"]), str(entry["variant"]), float(entry["difference"]),
                None if entry.get("cosine") is None else float(entry["cosine"]),
            )
            for entry in document["worst"]
        )  # fmt: skip
        return cls(str(document["measure"]), tuple(map(float, document["differences"])), worst)
