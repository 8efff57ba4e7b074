"""Divides sequences into runs of similar length to reduce padding.

Does no I/O. The server's scheduler selects requests with it; workers and ``conch convert`` divide sequences into runs.

A run of ``n`` sequences padded to length ``L`` takes about as long as ``OVERHEAD + n * L`` tokens, regardless of the
sequences' real lengths. Therefore a shorter sequence shares a longer one's run if its padding costs less than another
run, and never beyond its bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

#: The fixed cost of a run, in tokens. Measured with MiniLM on two cores (OpenVINO, int8): about 1 ms per run
#: and 21 µs per token.
OVERHEAD: Final = 48
#: Tokens of a batch without ``max_batch_tokens`` in the configuration. Larger batches only increase latency: measured
#: with MiniLM, two cores compute as many tokens per second at 512 as at 4096.
CPU_TOKENS: Final = 1024
GPU_TOKENS: Final = 16384
#: The granularity of comparing lengths (tokens).
STEP: Final = 8
_SMALLEST: Final = 32


def bucket(length: int) -> int:
    """Return the greatest length to which a sequence may be padded: a power of two, at least 32."""
    return max(_SMALLEST, 1 << (length - 1).bit_length())


def on_grid(rows: int, length: int) -> tuple[int, int]:
    """Return the smallest shape of a coarse grid that holds ``[rows, length]``.

    Engines that are slow with new shapes are padded to it; where there are two engines, it selects the engine.
    """
    return _rounded(rows, 1), _rounded(length, STEP)


def _rounded(size: int, finest: int) -> int:
    """Round ``size`` up to a multiple of a quarter to an eighth of itself, or of ``finest``."""
    step = max(finest, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


def runs(lengths: Sequence[int], *, budget: int, limit: int = 0, counts: Sequence[int] = ()) -> list[list[int]]:
    """Divide the indices of ``lengths`` into runs of least cost, the longest first.

    ``budget`` limits a run's tokens with padding and ``limit`` its sequences (0: unlimited), except for a run of a
    single index. ``counts[i]`` is the number of sequences of index ``i``, which stay together; the default is 1 each.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    if len(order) < 2:
        return [order] if order else []
    divided = []
    start = 0
    for end in _cuts(order, lengths, counts, budget):
        divided += _bounded(order[start:end], lengths, counts, budget, limit)
        start = end
    return divided


def equal_runs(lengths: Sequence[int], *, budget: int, limit: int = 0) -> list[list[int]]:
    """Divide sequences that must not be padded: only equal lengths share a run, the longest first."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    same = [list(part) for _, part in groupby(order, key=lengths.__getitem__)]
    return [run for part in same for run in _bounded(part, lengths, (), budget, limit)]


def _cuts(order: Sequence[int], lengths: Sequence[int], counts: Sequence[int], budget: int) -> list[int]:
    """Return the ends of runs in ``order``, by dynamic programming over groups of almost equal lengths."""
    ends: list[int] = []  # of each group
    tokens: list[int] = []  # its greatest length
    total: list[int] = [0]  # sequences before it
    for at, index in enumerate(order):
        length = lengths[index]
        if not ends or tokens[-1] - length >= STEP or tokens[-1] > bucket(length):
            tokens.append(length)
            ends.append(at + 1)
            total.append(total[-1])
        ends[-1] = at + 1
        total[-1] += counts[index] if counts else 1
    if len(ends) == 1:
        return ends
    cheapest = [0.0]
    first = [0]
    for group in range(len(ends)):
        best = float("inf")
        came_from = group
        furthest = bucket(tokens[group])
        for start in range(group, -1, -1):
            if tokens[start] > furthest:
                break
            padded = (total[group + 1] - total[start]) * tokens[start]
            cost = cheapest[start] + padded + OVERHEAD * max(1, -(-padded // budget))
            if cost < best:
                best, came_from = cost, start
        cheapest.append(best)
        first.append(came_from)
    cuts = []
    group = len(ends)
    while group:
        cuts.append(ends[group - 1])
        group = first[group]
    return cuts[::-1]


def _bounded(
    part: Sequence[int], lengths: Sequence[int], counts: Sequence[int], budget: int, limit: int
) -> list[list[int]]:
    """Divide ``part`` into pieces within ``budget`` and ``limit``."""
    pieces: list[list[int]] = []
    rows = room = 0
    for index in part:
        count = counts[index] if counts else 1
        if rows + count > room:
            pieces.append([])
            rows = 0
            room = budget // max(lengths[index], 1)
            if limit:
                room = min(room, limit)
        pieces[-1].append(index)
        rows += count
    return pieces
