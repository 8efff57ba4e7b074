"""Whether a second variant is worth its memory: which one, where it is faster, and by how much.

Pure.  The rule: a variant gains at a shape where it is 1.1 times as fast as ``auto`` by the medians, the quartiles of
the two do not overlap, and neither figure is busy; it is held where all that makes 1.05 times of what is expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from conch.checkpoints.by_shape import Companion, Gain
from conch.checkpoints.manifest import Latency, Manifest, Variant
from conch.convert.expected import beside, cost_of, expected_speed_up, mean_speed_up
from conch.convert.measure import by_shape
from conch.texts.shapes import Mix, Shape

#: How many times faster a variant must be at a shape to count there, and overall to be held.
WORTH_AT_A_SHAPE: Final = 1.1
WORTH_OVERALL: Final = 1.05
#: Fewer runs have no quartiles, and so no noise to compare a difference with.
MIN_RUNS: Final = 4
#: The least that is told: gains are positive, however long a busy machine kept one figure waiting.
_LEAST_GAIN: Final = 0.001


@dataclass(frozen=True, slots=True)
class PossibleCompanion:
    """A variant beside ``auto``, with what it gains and whether that is worth it."""

    variant: Variant
    companion: Companion

    @property
    def worth_it(self) -> bool:
        """Whether both together are faster by more than noise."""
        return self.companion.overall >= WORTH_OVERALL

    @property
    def where(self) -> str:
        """The measured shapes at which it is faster, with how much: ``1x16 (1.31x), 1x128 (1.12x)``."""
        gained = (one for one in self.companion.gains if one.gain >= WORTH_AT_A_SHAPE)
        return ", ".join(f"{one.batch}x{one.tokens} ({one.gain:.2f}x)" for one in gained)


def candidates(manifest: Manifest, engines: frozenset[str], mix: Mix) -> list[PossibleCompanion]:
    """Every other variant on ``engines`` that passed and is faster than ``auto`` somewhere, the most useful first.

    ``mix`` is what is expected; without any, all measured shapes weigh the same.
    """
    auto = manifest.variant(manifest.auto)
    made = (
        _candidate(auto, one, mix)
        for one in manifest.variants
        if one.passed and one.name != auto.name and one.engine in engines and one.latency and auto.latency
    )
    return sorted((one for one in made if one.where), key=lambda one: -one.companion.overall)


def _candidate(auto: Variant, other: Variant, mix: Mix) -> PossibleCompanion:
    gains = tuple(_gains(auto, other))
    companion = Companion(other.name, gains)
    usual = cost_of(auto.latency)
    both = beside(usual, cost_of(other.latency), companion)
    shapes = [Shape(one.batch, one.tokens) for one in gains]
    overall = expected_speed_up(both, usual, mix) if mix else mean_speed_up(both, usual, shapes)
    return PossibleCompanion(other, Companion(other.name, gains, round(overall, 3)))


def _gains(auto: Variant, other: Variant) -> Iterator[Gain]:
    usual, faster = by_shape(auto.latency), by_shape(other.latency)
    for shape in sorted(usual.keys() & faster.keys()):
        gain = round(_gain(usual[shape], faster[shape]), 3)
        yield Gain(shape.batch, shape.tokens, max(gain, _LEAST_GAIN))


def _gain(usual: Latency, other: Latency) -> float:
    """How many times faster ``other`` is; 1 where the figures do not tell the two apart."""
    gain = usual.median_ms / other.median_ms
    if gain <= 1:
        return gain
    known = min(usual.runs, other.runs) >= MIN_RUNS and not (usual.busy or other.busy)
    apart = usual.median_ms * (1 - usual.spread / 2) > other.median_ms * (1 + other.spread / 2)
    return gain if known and apart and gain >= WORTH_AT_A_SHAPE else 1.0
