"""Loads that failed: when the next may be tried, so that a model that cannot load is not tried for every request."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

from conch.errors import Code, ConchError

#: Seconds before a model is loaded again after its first, second, third … failure in a row; the last one repeats.
RETRY_SECONDS: Final = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class _Failure:
    count: int
    until: float
    error: ConchError


class LoadBackOff:
    """The failures since each model's last load that succeeded; times are seconds of one clock."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    def failed(self, name: str, error: ConchError, now: float) -> None:
        """A load has failed: the next is allowed later than after the failure before."""
        count = self._failures[name].count + 1 if name in self._failures else 1
        seconds = RETRY_SECONDS[min(count, len(RETRY_SECONDS)) - 1]
        self._failures[name] = _Failure(count, now + seconds, error)

    def forget(self, name: str) -> None:
        """The model was loaded, or somebody who may know better asks for it."""
        self._failures.pop(name, None)

    def refusal(self, name: str, now: float) -> ConchError | None:
        """Why the model is not loaded now; None where it may be."""
        failure = self._failures.get(name)
        if failure is None or failure.until <= now:
            return None
        times = "" if failure.count == 1 else f" {failure.count} times"
        seconds = ceil(failure.until - now)
        told = f"model '{name}' failed to load{times}, and is tried again in {seconds} s: "
        error = failure.error
        return ConchError(told + error.message.strip(), Code.UNAVAILABLE, public=told + error.public.strip())

    def failing(self, now: float) -> list[str]:
        """The models that are not loaded now because their last load failed."""
        return sorted(name for name, failure in self._failures.items() if failure.until > now)
