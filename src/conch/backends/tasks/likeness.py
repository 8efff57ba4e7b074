"""How far two answers of a network are apart, and what is said of one that is not transformers' own.

Used when tasks are made, for what they try out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.base.likeness import unlike

#: How far apart two answers to the same may be for rounding, as a part of the greatest number.
_ROUNDING: Final[Mapping[str, float]] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
#: The same for graphs in INT8, whose scales may be those of the whole batch.
_COARSE: Final = 0.25
#: What a served answer may differ from transformers', at least.
_LIKE: Final = 2e-4


def rounding(precision: str) -> float:
    """How far apart two answers in ``precision`` may be for rounding alone."""
    return _ROUNDING.get(precision, _COARSE)


def distance(wanted: Array, found: Array) -> float:
    """The greatest difference as a part of the greatest number, over what both have; ``found`` may have padding."""
    if found.shape != wanted.shape:
        found = found[: len(wanted)]
    size = float(np.abs(wanted, where=np.isfinite(wanted), out=np.zeros_like(wanted)).max(initial=0))
    with np.errstate(invalid="ignore"):
        apart = np.where(wanted == found, 0, np.abs(wanted - found))
    furthest = float(apart.max(initial=0))
    return furthest / max(size, 1e-6) if np.isfinite(furthest) else float("inf")


def require_likeness(found: Mapping[str, Array], wanted: Mapping[str, Array], precision: str, what: str) -> None:
    """Raise INVALID_ARG if outputs that are in both differ; ``what`` they are for, as in "for 'Hello'"."""
    apart = max([distance(wanted[name][0], array[0]) for name, array in found.items() if name in wanted], default=0.0)
    if apart > max(_LIKE, rounding(precision)):
        raise unlike(f"its numbers {what} differ by {apart:.2g} of the greatest")
