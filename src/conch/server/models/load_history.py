"""The recent failures and evictions of models that are loaded on demand: back-off and the detection of thrashing."""

from __future__ import annotations

from collections import Counter, deque
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
        prefix = f"model '{name}' failed to load{times}, and is tried again in {seconds} s: "
        error = failure.error
        return ConchError(prefix + error.message.strip(), Code.UNAVAILABLE, public=prefix + error.public.strip())

    def failing(self, now: float) -> list[str]:
        """Return the models that are in back-off after a failed load."""
        return sorted(name for name, failure in self._failures.items() if failure.until > now)


#: Length of the observed window, and minimum interval between warnings (s).
WINDOW: Final = 60.0
#: Number of loads within the window, of models evicted less than a window before, that cause a warning.
WORTH_A_WARNING: Final = 6
_NAMED: Final = 3


class Thrashing:
    """Counts models that are loaded again soon after their eviction; times are seconds of one clock."""

    def __init__(self) -> None:
        self._left: dict[str, float] = {}
        self._returned: deque[tuple[float, str]] = deque()
        self._warned = float("-inf")

    def left(self, name: str, now: float) -> None:
        """Record the eviction of a model."""
        self._left[name] = now

    def loads(self, name: str, now: float) -> bool:
        """Record a load; return whether the model was evicted at most ``WINDOW`` seconds before."""
        returns = now - self._left.pop(name, float("-inf")) <= WINDOW
        if returns:
            self._returned.append((now, name))
        return returns

    def warning(self, now: float) -> str:
        """Return a warning, at most once per ``WINDOW``; empty if there is no thrashing."""
        while self._returned and now - self._returned[0][0] > WINDOW:
            self._returned.popleft()
        if len(self._returned) < WORTH_A_WARNING or now - self._warned < WINDOW:
            return ""
        self._warned = now
        names = Counter(name for _, name in self._returned).most_common()
        shown = ", ".join(f"'{name}' {count} times" if count > 1 else f"'{name}'" for name, count in names[:_NAMED])
        others = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return (
            f"models are evicted and reloaded too often: within {WINDOW:.0f} s, {len(self._returned)} loads "
            f"were of models that had just made "
            f"room for others ({shown}{others}); --max-loaded-models or --memory-budget is too small for these requests"
        )
