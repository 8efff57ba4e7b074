"""Compares the tokens that a model generates with those of transformers.

Used at load by engines and tasks for which transformers can run the same network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from conch.core.errors import ConchError, invalid

#: Number of tokens to compare.
VERIFIED_TOKENS: Final = 5
#: Limit for the processor time per core of the first step (s); above it, the comparison is skipped as too expensive.
SLOW_STEP: Final = 0.5


def greedy_difference(tokens: Sequence[int], wanted: Sequence[int], logits: Sequence[Any], tie: float) -> str:
    """Describe the first difference between ``tokens`` and the ``wanted`` ones; empty if there is none.

    ``logits`` holds the logits ``[vocabulary]`` from which each token of ``wanted`` was chosen. If the logits of two
    different tokens are closer than ``tie``, relative to the greatest absolute logit, they count as equal, and the
    comparison ends there.
    """
    for place, (token, expected) in enumerate(zip(tokens, wanted, strict=False)):
        if token != expected:
            row = logits[place].float()
            behind = float(row[expected] - row[token])
            if behind <= tie * max(float(row[row.isfinite()].abs().max()), 1e-6):
                return ""
            return f"token {place} is {token} and not {expected}, whose logit is greater by {behind:.3g}"
    return ""


def tie_of(dtype: str) -> float:
    """Return the tolerance between equal logits of a network in ``dtype``, relative to the greatest absolute logit."""
    return 1e-3 if dtype == "float32" else 0.05


def unlike(why: str) -> ConchError:
    """Return the error for a model whose output differs from that of transformers."""
    return invalid(
        f"the model does not answer as transformers does: {why}; set parameter 'verify_on_load' to false to serve it "
        "nevertheless"
    )
