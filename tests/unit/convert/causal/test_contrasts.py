"""Which continuations of a language model go another way soonest."""

from __future__ import annotations

import numpy as np

from conch.convert.causal.agreement import Predictions
from conch.convert.causal.conversion import contrasts


def said(*continuations: list[int], logprob: float = -1.0) -> Predictions:
    return Predictions([np.full(4, logprob)], [np.zeros(4)], continuations)


def test_continuation_that_differs_at_once_is_the_worst_and_an_equal_one_is_not_shown() -> None:
    before, after = said([1, 2, 3, 4], [5, 6, 7, 8], [9, 9]), said([1, 2, 3, 0], [0, 6, 7, 8], [9, 9], logprob=-1.5)

    found = contrasts(before, after, [[1], [2], [3]], lambda ids: " ".join(map(str, ids)))

    assert [(one.text, one.variant, one.difference) for one in found.worst] == [
        ("2", "0 6 7 8", 1.0),
        ("1", "1 2 3 0", 0.25),
    ]
    assert found.differences == (0.5,) * 4
