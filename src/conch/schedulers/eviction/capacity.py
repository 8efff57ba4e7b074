"""How much room loaded models take, how much there is, and the sentences that show the sum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from conch.telemetry.memory import mebibytes


class Capacity(NamedTuple):
    """An amount of what is limited: ``models`` with workers of their own, and their ``memory`` (bytes)."""

    models: int = 0
    memory: int = 0

    def plus(self, other: Capacity) -> Capacity:
        return Capacity(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Capacity) -> Capacity:
        return Capacity(*(a - b for a, b in zip(self, other, strict=True)))

    def within(self, limit: Capacity) -> bool:
        """Whether this is no more than ``limit``, of which 0 is no limit."""
        return all(not most or amount <= most for amount, most in zip(self, limit, strict=True))


def total(rooms: Iterable[Capacity]) -> Capacity:
    """The sum of several."""
    whole = Capacity()
    for capacity in rooms:
        whole = whole.plus(capacity)
    return whole


def the_sum(needed: Capacity, used: Capacity, limit: Capacity) -> str:
    """Why ``needed`` does not fit beside ``used``, for each limit that it exceeds."""
    parts: list[str] = []
    if limit.models and needed.models + used.models > limit.models:
        what = "1 model" if needed.models == 1 else f"{needed.models} models"
        others = f" and {used.models} others" if used.models else ""
        parts.append(f"{what}{others} are more than --max-loaded-models={limit.models}")
    if limit.memory and needed.memory + used.memory > limit.memory:
        others = f" and {mebibytes(used.memory)} of others" if used.memory else ""
        parts.append(f"{mebibytes(needed.memory)}{others} are more than --memory-budget={mebibytes(limit.memory)}")
    return ", and ".join(parts)
