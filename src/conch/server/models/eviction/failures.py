"""Back-off after failed loads, so that a model that cannot load is not loaded again for every request."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

from conch.core.errors import Code, ConchError

#: Delay before the next load after the first, second, third … consecutive failure (s); the last delay repeats.
RETRY_SECONDS: Final = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class _Failure:
    count: int
    until: float
    error: ConchError


class LoadBackOff:
    """The failures of each model since its last successful load; times are seconds of one clock."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    def failed(self, name: str, error: ConchError, now: float) -> None:
        """Record a failed load; the delay grows with consecutive failures."""
        count = self._failures[name].count + 1 if name in self._failures else 1
        seconds = RETRY_SECONDS[min(count, len(RETRY_SECONDS)) - 1]
        self._failures[name] = _Failure(count, now + seconds, error)

    def forget(self, name: str) -> None:
        """Reset a model, because it was loaded or a load was requested explicitly."""
        self._failures.pop(name, None)

    def refusal(self, name: str, now: float) -> ConchError | None:
        """Return the error for requests while a model may not be loaded; None if it may be loaded."""
        failure = self._failures.get(name)
        if failure is None or failure.until <= now:
            return None
        times = "" if failure.count == 1 else f" {failure.count} times"
        seconds = ceil(failure.until - now)
        told = f"model '{name}' failed to load{times}, and is tried again in {seconds} s: "
        error = failure.error
        return ConchError(told + error.message.strip(), Code.UNAVAILABLE, public=told + error.public.strip())

    def failing(self, now: float) -> list[str]:
        """Return the models that are in back-off after a failed load."""
        return sorted(name for name, failure in self._failures.items() if failure.until > now)
