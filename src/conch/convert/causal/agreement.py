"""Compares a language model's variant with the reference by perplexity, next tokens and continuations, and judges it.

Does no I/O: takes predictions, returns figures and reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.convert.statistics import Z


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of one network.

    ``logprobs`` are, by text, the natural log-probabilities of all tokens after the first, and ``next_tokens`` the most
    likely tokens at these positions.  ``continuations`` are greedy continuations by prompt.
    """

    logprobs: Sequence[Array]
    next_tokens: Sequence[Array]
    continuations: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of the variant (``value``) and of torch in fp32 (``reference``); ``delta`` is the relative difference.

    ``low`` and ``high`` are the 95 % confidence interval of ``delta``, from the variance over single tokens.
    """

    value: float
    reference: float
    delta: float
    low: float
    high: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Greedy:
    """Agreement of continuations without sampling.

    ``prefix`` is the mean share before the first difference, and ``mean_tokens`` the same in tokens, of ``tokens``.
    ``identical`` is the share of prompts with identical continuations.
    """

    prefix: float
    mean_tokens: float
    tokens: int
    identical: float
    prompts: int


@dataclass(frozen=True, slots=True)
class CausalAgreement:
    """Agreement of a variant; ``top_1`` is the share of positions in real text with the same most likely next token."""

    perplexity: Perplexity
    top_1: float
    greedy: Greedy

    def to_json(self) -> dict[str, Mapping[str, Any]]:
        """Return the figures by metric, as stored in ``conch.json``."""
        return {
            "perplexity": asdict(self.perplexity),
            "top_1": {"value": self.top_1},
            "greedy": asdict(self.greedy),
        }


@dataclass(frozen=True, slots=True)
class CausalTolerance:
    """The tolerance of a precision.

    ``delta`` is the maximum relative difference of perplexity, in both directions, because a much lower perplexity is
    an error too.  ``top_1`` and ``prefix`` are minimum values.
    """

    delta: float
    top_1: float
    prefix: float


TOLERANCES: Final[Mapping[str, CausalTolerance]] = {
    # The same arithmetic in another order: occasional near-ties, after which a continuation differs.  The pipeline's
    # own log-probabilities differ by 0.014 % for SmolLM2, although its graph matches torch's to 1e-8.
    "fp32": CausalTolerance(delta=0.001, top_1=0.99, prefix=0.8),
    # Computed in bf16 if the CPU supports it.
    "fp16": CausalTolerance(delta=0.02, top_1=0.97, prefix=0.3),
    "int8": CausalTolerance(delta=0.03, top_1=0.92, prefix=0.3),
    # 16 levels per weight.  Small models lose more than large ones; at this tolerance the loss is visible in their
    # responses.
    "int4": CausalTolerance(delta=0.15, top_1=0.75, prefix=0.15),
}


def compare(reference: Predictions, variant: Predictions) -> CausalAgreement:
    """Compare a variant with the reference on the same texts and prompts."""
    before, after = (
        np.concatenate([np.asarray(text, np.float64) for text in predictions.logprobs])
        for predictions in (reference, variant)
    )
    lost = before - after
    mean = float(lost.mean())
    spread = float(lost.std(ddof=1)) if len(lost) > 1 and np.isfinite(mean) else 0.0
    half = Z * spread / float(np.sqrt(len(lost)))
    same = np.concatenate([a == b for a, b in zip(reference.next_tokens, variant.next_tokens, strict=True)])
    with np.errstate(over="ignore"):
        # The exponential of a difference of mean log-probabilities is a ratio of perplexities.
        delta, low, high = (float(np.expm1(value)) for value in (mean, mean - half, mean + half))
        value, expected = (float(np.exp(-logprobs.mean())) for logprobs in (after, before))
    perplexity = Perplexity(value, expected, delta, low, high, len(lost))
    return CausalAgreement(perplexity, float(same.mean()), _greedy(reference.continuations, variant.continuations))


def _greedy(reference: Sequence[Sequence[int]], variant: Sequence[Sequence[int]]) -> Greedy:
    lengths = [len(tokens) for tokens in reference]
    same = [shared_prefix(a, b) for a, b in zip(reference, variant, strict=True)]
    shares = [count / length for count, length in zip(same, lengths, strict=True)]
    identical = float(np.mean([share == 1 for share in shares]))
    return Greedy(float(np.mean(shares)), float(np.mean(same)), max(lengths), identical, len(lengths))


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens before the first difference of two continuations."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def reasons(precision: str, figures: CausalAgreement) -> tuple[str, ...]:
    """Return why a variant is refused, one sentence per missed bound; empty if it passes."""
    tolerance = TOLERANCES.get(precision.partition("-")[0], TOLERANCES["int4"])
    missed = []
    perplexity = figures.perplexity
    if not np.isfinite(perplexity.delta):
        missed.append("its log-probabilities are not finite")
    elif abs(perplexity.delta) > tolerance.delta:
        way = "higher" if perplexity.delta > 0 else "lower"
        missed.append(
            f"perplexity {perplexity.value:.2f} is {abs(perplexity.delta):.2%} {way} than the reference's "
            f"{perplexity.reference:.2f}, more than {tolerance.delta:.2%}"
        )
    if not figures.top_1 >= tolerance.top_1:
        missed.append(
            f"the likeliest next token being the same in {figures.top_1:.1%} of places is below {tolerance.top_1:.0%}"
        )
    if not figures.greedy.prefix >= tolerance.prefix:
        missed.append(
            f"{figures.greedy.prefix:.1%} of the greedy continuations being the same is below {tolerance.prefix:.0%}"
        )
    return tuple(missed)
