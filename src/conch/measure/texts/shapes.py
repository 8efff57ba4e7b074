"""Request shapes (batch x tokens) and their frequencies. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum
from typing import Final

from conch.core.errors import invalid

_EXPECTED: Final = re.compile(r"(\d+)x(\d+)(?::(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, order=True, slots=True)
class Shape:
    """The batch size of a request, and the number of tokens of each row."""

    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}"


#: Request shapes, and the fraction of the requests of each.
Mix = Mapping[Shape, float]


def parse_mix(text: str) -> Mix:
    """Parse ``1x16:0.9,32x128:0.1``: batch x tokens, each with a weight (default 1).

    Raises INVALID_ARG for other text.
    """
    mix: dict[Shape, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _EXPECTED.fullmatch(part)
        if match is None or not int(match[1]) or not int(match[2]):
            raise invalid(f"--expect {part}: expected batch x tokens with a weight, as in 1x16:0.9,32x128:0.1")
        shape = Shape(int(match[1]), int(match[2]))
        mix[shape] = mix.get(shape, 0.0) + float(match[3] or 1)
    total = fsum(mix.values())
    if text and not total:
        raise invalid(f"--expect {text}: at least one weight must be above 0")
    return {shape: weight / total for shape, weight in mix.items() if weight}
