"""Estimates the time of variants for the expected requests.  Times are in milliseconds.

A variant is measured at a few shapes; times at others are interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import exp, fsum, log

from conch.checkpoints.by_shape import Companion, ShapeTable
from conch.checkpoints.manifest import Latency, Variant
from conch.core.errors import invalid
from conch.core.lengths import CPU_TOKENS, runs
from conch.measure.texts.shapes import Mix, Shape

#: The time of one run at a shape (ms).
Cost = Callable[[Shape], float]


def check_mix(mix: Mix, measured: Sequence[Shape]) -> None:
    """Raise INVALID_ARG for a shape outside of the measured ones, where no estimate is possible."""
    batches, lengths = {shape.batch for shape in measured}, {shape.tokens for shape in measured}
    for shape in mix:
        for value, values, flag in ((shape.batch, batches, "--batch-size"), (shape.tokens, lengths, "--seq-len")):
            if not min(values) <= value <= max(values):
                raise invalid(
                    f"--expect {shape} is outside of what is measured ({flag} {' '.join(map(str, sorted(values)))}): "
                    f"add {flag} {value}"
                )


def cost_of(latency: Sequence[Latency]) -> Cost:
    """Return the time of a variant at any shape, from its medians."""
    table = ShapeTable({(point.batch, point.tokens): point.median_ms for point in latency})
    return lambda shape: table.at(shape.batch, shape.tokens)


def beside(usual: Cost, other: Cost, companion: Companion) -> Cost:
    """Return the time of both variants together: that of ``other`` where ``companion`` selects it."""
    return lambda shape: (other if companion.faster_at(shape.batch, shape.tokens) else usual)(shape)


def served(shape: Shape) -> Iterable[Shape]:
    """Return the runs that the server makes of a request, which are limited to the tokens of a CPU batch."""
    return [Shape(len(run), shape.tokens) for run in runs([shape.tokens] * shape.batch, budget=CPU_TOKENS)]


def milliseconds(cost: Cost, shape: Shape) -> float:
    """Return the time of a request of ``shape`` as the server runs it (ms)."""
    return fsum(cost(run) for run in served(shape))


def expected_speed_up(faster: Cost, slower: Cost, mix: Mix) -> float:
    """Return how many times faster ``faster`` is than ``slower`` for ``mix``: the ratio of the mean times."""
    times = [fsum(weight * milliseconds(cost, shape) for shape, weight in mix.items()) for cost in (slower, faster)]
    return times[0] / times[1]


def mean_speed_up(faster: Cost, slower: Cost, shapes: Sequence[Shape]) -> float:
    """Return how many times faster ``faster`` is than ``slower``: the geometric mean over ``shapes``."""
    logs = [log(milliseconds(slower, shape) / milliseconds(faster, shape)) for shape in shapes]
    return exp(fsum(logs) / len(logs))


def speed_up_for(mix: Mix, faster: Variant, slower: Variant) -> float:
    """Return the speed-up of two variants for ``mix``; nan if one was not measured."""
    if not faster.latency or not slower.latency:
        return float("nan")
    return expected_speed_up(cost_of(faster.latency), cost_of(slower.latency), mix)
