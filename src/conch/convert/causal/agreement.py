"""How far a language model's variant is from the reference: perplexity, next tokens and continuations; its verdict.

Pure: what was observed in, figures and reasons out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from conch.backends.native.arrays import Array


@dataclass(frozen=True, slots=True)
class Observed:
    """What one network said.

    By text: the natural log-probability of each token after the first, and the likeliest token at each of these places;
    and by prompt its greedy continuation.
    """

    logprobs: Sequence[Array]
    likeliest: Sequence[Array]
    continuations: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """``value`` of the variant, ``reference`` that of torch in fp32, ``delta`` the difference as a share of the latter.

    ``low`` and ``high`` bound ``delta`` with 95 % confidence, by the spread over single tokens.
    """

    value: float
    reference: float
    delta: float
    low: float
    high: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Greedy:
    """Continuations without sampling: how much of them is equal before the first difference, as a share (``prefix``)
    and in tokens (``mean_tokens`` of ``tokens``), and the share of prompts whose continuation is ``identical``."""

    prefix: float
    mean_tokens: float
    tokens: int
    identical: float
    prompts: int


@dataclass(frozen=True, slots=True)
class Figures:
    """``top_1`` is the share of places of real text at which both find the same next token likeliest."""

    perplexity: Perplexity
    top_1: float
    greedy: Greedy

    def to_json(self) -> dict[str, Mapping[str, Any]]:
        """As the manifest's ``agreement`` has it."""
        return {
            "perplexity": asdict(self.perplexity),
            "top_1": {"value": self.top_1},
            "greedy": asdict(self.greedy),
        }


@dataclass(frozen=True, slots=True)
class CausalTolerance:
    """What a precision must reach: perplexity may be higher by ``delta`` at most (a share; lower is no fault unless by
    more than that, too), ``top_1`` and ``prefix`` are least values."""

    delta: float
    top_1: float
    prefix: float


TOLERANCES: Final[Mapping[str, CausalTolerance]] = {
    # The same arithmetic in another order: a near-tie here and there, after which a continuation goes another way.
    # The pipeline's log-probabilities are alike off by 0.014 % for SmolLM2, whose graph gives torch's to 1e-8.
    "fp32": CausalTolerance(delta=0.001, top_1=0.99, prefix=0.8),
    # Computed in bf16 where the CPU has it.
    "fp16": CausalTolerance(delta=0.02, top_1=0.97, prefix=0.3),
    "int8": CausalTolerance(delta=0.03, top_1=0.92, prefix=0.3),
    # 16 steps for each weight.  Small models lose more than large ones, and this much can be read in their answers.
    "int4": CausalTolerance(delta=0.15, top_1=0.75, prefix=0.15),
}
_Z: Final = 1.959964


def compare(reference: Observed, variant: Observed) -> Figures:
    """The figures of a variant on the same texts and prompts."""
    before = np.concatenate([np.asarray(one, np.float64) for one in reference.logprobs])
    after = np.concatenate([np.asarray(one, np.float64) for one in variant.logprobs])
    lost = before - after
    mean = float(lost.mean())
    spread = float(lost.std(ddof=1)) if len(lost) > 1 and np.isfinite(mean) else 0.0
    half = _Z * spread / float(np.sqrt(len(lost)))
    delta, low, high = (_share(one) for one in (mean, mean - half, mean + half))
    same = np.concatenate([a == b for a, b in zip(reference.likeliest, variant.likeliest, strict=True)])
    perplexity = Perplexity(_exp(-after.mean()), _exp(-before.mean()), delta, low, high, len(lost))
    return Figures(perplexity, float(same.mean()), _greedy(reference.continuations, variant.continuations))


def _exp(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _share(value: float) -> float:
    """A difference of mean log-probabilities as a share of perplexity."""
    with np.errstate(over="ignore"):
        return float(np.expm1(value))


def _greedy(reference: Sequence[Sequence[int]], variant: Sequence[Sequence[int]]) -> Greedy:
    lengths = [len(one) for one in reference]
    same = [common(a, b) for a, b in zip(reference, variant, strict=True)]
    shares = [count / length for count, length in zip(same, lengths, strict=True)]
    whole = [count == length for count, length in zip(same, lengths, strict=True)]
    return Greedy(
        float(np.mean(shares)), float(np.mean(same)), max(lengths), float(np.mean(whole)), len(lengths)
    )  # fmt: skip


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two continuations share before the first difference."""
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count


def reasons(precision: str, figures: Figures) -> tuple[str, ...]:
    """Why a variant is refused, a sentence for each bound that it misses; empty when it passes."""
    tolerance = TOLERANCES.get(precision.partition("-")[0], TOLERANCES["int4"])
    found = []
    perplexity = figures.perplexity
    if not np.isfinite(perplexity.delta):
        found.append("its log-probabilities are not finite")
    elif abs(perplexity.delta) > tolerance.delta:
        way = "higher" if perplexity.delta > 0 else "lower"
        found.append(
            f"perplexity {perplexity.value:.2f} is {abs(perplexity.delta):.2%} {way} than the reference's "
            f"{perplexity.reference:.2f}, more than {tolerance.delta:.2%}"
        )
    if not figures.top_1 >= tolerance.top_1:
        found.append(
            f"the likeliest next token being the same in {figures.top_1:.1%} of places is below {tolerance.top_1:.0%}"
        )
    if not figures.greedy.prefix >= tolerance.prefix:
        found.append(
            f"{figures.greedy.prefix:.1%} of the greedy continuations being the same is below {tolerance.prefix:.0%}"
        )
    return tuple(found)
