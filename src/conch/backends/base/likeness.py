"""Whether a model that writes text answers as transformers does, and what is said of one that does not.

Used when models are loaded, by engines and tasks that have a network of transformers at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from conch.errors import ConchError, invalid

#: Tokens that are compared.
VERIFIED_TOKENS: Final = 5
#: A first step that takes more processor time of each core (s) means that a comparison is not cheap, and there is none.
SLOW_STEP: Final = 0.5


def greedy_difference(tokens: Sequence[int], wanted: Sequence[int], logits: Sequence[Any], tie: float) -> str:
    """Where ``tokens`` part from those that are ``wanted``, empty where they do not.

    ``logits`` ``[vocabulary]`` led to each of ``wanted``.  Tokens whose logits are closer than ``tie``, a part of the
    greatest one, are equally good, and nothing is compared after them.
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
    """How much closer than the greatest logit two logits of a network in ``dtype`` must be to count as equal."""
    return 1e-3 if dtype == "float32" else 0.05


def unlike(why: str) -> ConchError:
    """The error for a model that does not answer as transformers does."""
    return invalid(
        f"the model does not answer as transformers does: {why}; set parameter 'verify_on_load' to false to serve it "
        "nevertheless"
    )
