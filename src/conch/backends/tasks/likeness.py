"""Comparison of network outputs, among themselves and with those of transformers.

Used by the checks that run when a task is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.base.likeness import unlike

#: The tolerance for rounding between two outputs for the same input, relative to the largest value.
_ROUNDING: Final[Mapping[str, float]] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
#: The same for INT8 graphs, whose scales may depend on the whole batch.
_COARSE: Final = 0.25
#: The minimum tolerance between an output and that of transformers.
_LIKE: Final = 2e-4


def rounding(precision: str) -> float:
    """Return the tolerance for rounding in ``precision``, relative to the largest value."""
    return _ROUNDING.get(precision, _COARSE)


def distance(wanted: Array, output: Array) -> float:
    """Return the largest difference relative to the largest value of ``wanted``; ``output`` may have padding rows."""
    if output.shape != wanted.shape:
        output = output[: len(wanted)]
    size = float(np.abs(wanted, where=np.isfinite(wanted), out=np.zeros_like(wanted)).max(initial=0))
    with np.errstate(invalid="ignore"):
        apart = np.where(wanted == output, 0, np.abs(wanted - output))
    furthest = float(apart.max(initial=0))
    return furthest / max(size, 1e-6) if np.isfinite(furthest) else float("inf")


def require_likeness(outputs: Mapping[str, Array], wanted: Mapping[str, Array], precision: str, what: str) -> None:
    """Raise INVALID_ARG if outputs in both mappings differ; ``what`` names the input, as in "for 'Hello'"."""
    apart = max([distance(wanted[name][0], array[0]) for name, array in outputs.items() if name in wanted], default=0.0)
    if apart > max(_LIKE, rounding(precision)):
        raise unlike(f"its numbers {what} differ by {apart:.2g} of the greatest")
