"""What is expected to be asked for, and what each variant takes for it.  Pure; times are milliseconds.

A variant is measured at a few shapes; what it takes at others is found between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import exp, fsum, log

from conch.checkpoints.by_shape import Companion, ShapeTable
from conch.checkpoints.manifest import Latency, Variant
from conch.errors import invalid
from conch.lengths import CPU_TOKENS, runs
from conch.texts.shapes import Mix, Shape

#: What one run takes at a shape.
Cost = Callable[[Shape], float]


def check_mix(mix: Mix, measured: Sequence[Shape]) -> None:
    """Raise INVALID_ARG for a shape that is outside of those measured, at which nothing is known."""
    batches, lengths = {shape.batch for shape in measured}, {shape.tokens for shape in measured}
    for shape in mix:
        for value, values, flag in ((shape.batch, batches, "--batch-size"), (shape.tokens, lengths, "--seq-len")):
            if not min(values) <= value <= max(values):
                raise invalid(
                    f"--expect {shape} is outside of what is measured ({flag} {' '.join(map(str, sorted(values)))}): "
                    f"add {flag} {value}"
                )


def cost_of(latency: Sequence[Latency]) -> Cost:
    """What a variant takes at any shape, by its medians."""
    table = ShapeTable({(one.batch, one.tokens): one.median_ms for one in latency})
    return lambda shape: table.at(shape.batch, shape.tokens)


def beside(usual: Cost, other: Cost, companion: Companion) -> Cost:
    """What both together take: ``other`` where ``companion`` says so."""
    return lambda shape: (other if companion.faster_at(shape.batch, shape.tokens) else usual)(shape)


def served(shape: Shape) -> Iterable[Shape]:
    """The runs that the server makes of a request: no more tokens at once than a CPU is given."""
    return [Shape(len(run), shape.tokens) for run in runs([shape.tokens] * shape.batch, budget=CPU_TOKENS)]


def milliseconds(cost: Cost, shape: Shape) -> float:
    """What a request of ``shape`` takes as the server runs it."""
    return fsum(cost(run) for run in served(shape))


def expected_speed_up(faster: Cost, slower: Cost, mix: Mix) -> float:
    """How many times faster the one is than the other for the whole of ``mix``: the ratio of the mean times."""
    times = [fsum(weight * milliseconds(cost, shape) for shape, weight in mix.items()) for cost in (slower, faster)]
    return times[0] / times[1]


def mean_speed_up(faster: Cost, slower: Cost, shapes: Sequence[Shape]) -> float:
    """How many times faster the one is than the other: the geometric mean over ``shapes``, which weigh the same."""
    logs = [log(milliseconds(slower, shape) / milliseconds(faster, shape)) for shape in shapes]
    return exp(fsum(logs) / len(logs))


def speed_up_for(mix: Mix, faster: Variant, slower: Variant) -> float:
    """The same of two variants; nan where one was not measured."""
    if not faster.latency or not slower.latency:
        return float("nan")
    return expected_speed_up(cost_of(faster.latency), cost_of(slower.latency), mix)
