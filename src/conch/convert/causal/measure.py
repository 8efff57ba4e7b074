"""How fast a language model reads and writes, in the manifest's terms: one run of the network.

A prompt of N tokens is a run of 1 x N; a decoding step of B sequences is one of B x 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from conch.checkpoints.manifest import Latency
from conch.convert.causal.texts import Texts
from conch.convert.measure import Shape, summary
from conch.convert.plan import Plan
from conch.errors import invalid

BATCH_SIZES: Final = (1, 8)
PROMPTS: Final = (128, 512)
#: Tokens before the first that is measured, and decoding steps that are measured at once.
BEFORE: Final = 32
STEPS: Final = 16
LEAST_RUNS: Final = 3
MOST_RUNS: Final = 300


class Runs(Protocol):
    """What can be measured: see ``Served`` and ``CausalNetwork``."""

    def prefill(self, prompt: Sequence[int]) -> float: ...
    def decode(self, prompts: Sequence[Sequence[int]], count: int) -> list[float]: ...


def shapes(plan: Plan, context: int) -> list[Shape]:
    """What is measured: a decoding step for each batch size, a prompt of each length.

    INVALID_ARG for a length that is asked for and that the model does not take; the usual ones are cut.
    """
    most = context - 1
    for length in plan.sequence_lengths:
        if length > most:
            raise invalid(f"--seq-len {length} is more than the model takes: at most {most} tokens, and one to write")
    lengths = plan.sequence_lengths or [min(length, most) for length in PROMPTS]
    batches = {Shape(batch, 1) for batch in plan.batch_sizes or BATCH_SIZES}
    return sorted(batches) + sorted({Shape(1, length) for length in lengths})


def measure(
    runs: Runs,
    shape: Shape,
    texts: Texts,
    context: int,
    *,
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Latency:
    """The latency of one shape in about ``budget`` seconds; the first run, or a decoding step, is not counted."""
    start = clock()
    seconds: list[float] = []
    if shape.tokens > 1:
        prompt = texts.stream(shape.tokens)
        runs.prefill(prompt)
        while len(seconds) < LEAST_RUNS or (clock() - start < budget and len(seconds) < MOST_RUNS):
            seconds.append(runs.prefill(prompt))
        return summary(shape, seconds)
    before = min(BEFORE, max(1, context // 2))
    stream = texts.stream(before + shape.batch)
    # No two of the prompts are the same.
    prompts = [stream[place : place + before] for place in range(shape.batch)]
    steps = max(1, min(STEPS, context - before - 2))
    while len(seconds) < LEAST_RUNS or (clock() - start < budget and len(seconds) < MOST_RUNS):
        seconds += runs.decode(prompts, steps + 1)[1:]
    return summary(shape, seconds)
