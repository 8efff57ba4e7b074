"""Where a language model's variant goes another way: single tokens, and continuations.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from conch.checkpoints.contrasts import Contrast, Contrasts
from conch.convert.causal.agreement import Predictions, shared_prefix
from conch.convert.contrasting import kept, shortened


def contrasts(
    reference: Predictions,
    variant: Predictions,
    prompts: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> Contrasts:
    """The differences of tokens' log-probabilities, and the continuations by how soon they differ."""
    pairs = list(zip(reference.continuations, variant.continuations, strict=True))
    before, after = (np.concatenate([np.asarray(text) for text in one.logprobs]) for one in (reference, variant))
    lost = [1 - shared_prefix(a, b) / len(a) if len(a) else 0.0 for a, b in pairs]

    def describe(index: int) -> Contrast:
        expected, given = pairs[index]
        return Contrast(
            shortened(decode(prompts[index])), shortened(decode(expected)), shortened(decode(given)),
            round(lost[index], 4),
        )  # fmt: skip

    return kept("difference of a token's log-probability", np.abs(before - after), lost, describe)
