"""Detects thrashing: the same models are evicted and loaded again and again. Warns at most once a minute."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

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
