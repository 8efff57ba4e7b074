"""Capacity arithmetic of on-demand loading, and the messages that explain why models do not fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from conch.machine.memory import mebibytes


class Capacity(NamedTuple):
    """An amount of the limited resources: ``models`` with their own workers, and their ``memory`` (bytes)."""

    models: int = 0
    memory: int = 0

    def plus(self, other: Capacity) -> Capacity:
        return Capacity(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Capacity) -> Capacity:
        return Capacity(*(a - b for a, b in zip(self, other, strict=True)))

    def within(self, limit: Capacity) -> bool:
        """Whether this is within ``limit``, where 0 means no limit."""
        return all(not most or amount <= most for amount, most in zip(self, limit, strict=True))


def total(rooms: Iterable[Capacity]) -> Capacity:
    """Return the sum of several capacities."""
    whole = Capacity()
    for capacity in rooms:
        whole = whole.plus(capacity)
    return whole


def the_sum(needed: Capacity, used: Capacity, limit: Capacity) -> str:
    """Explain for each exceeded limit why ``needed`` does not fit beside ``used``."""
    parts: list[str] = []
    if limit.models and needed.models + used.models > limit.models:
        what = "1 model" if needed.models == 1 else f"{needed.models} models"
        others = f" and {used.models} others" if used.models else ""
        parts.append(f"{what}{others} are more than --max-loaded-models={limit.models}")
    if limit.memory and needed.memory + used.memory > limit.memory:
        others = f" and {mebibytes(used.memory)} of others" if used.memory else ""
        parts.append(f"{mebibytes(needed.memory)}{others} are more than --memory-budget={mebibytes(limit.memory)}")
    return ", and ".join(parts)
