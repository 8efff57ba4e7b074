"""When to ask a cache somewhere else that has not answered: a pure state machine that is given the time."""

from __future__ import annotations

from typing import Final

#: Seconds before the first, second, third … attempt to reach it again; the last one repeats.
PAUSES: Final = (1.0, 2.0, 5.0, 10.0, 30.0)


class Availability:
    """Whether a cache answers.  While it does not, requests go without it, and an attempt is made now and then."""

    def __init__(self) -> None:
        self.up = True
        self._failures = 0
        self._next = 0.0
        self._trying = False

    def failed(self, now: float) -> bool:
        """It did not answer at ``now`` (s); True if it had done so before."""
        if not self.up and not self._trying:
            return False  # a call that began before it was known to be down
        was_up, self.up, self._trying = self.up, False, False
        self._next = now + self.pause
        self._failures += 1
        return was_up

    @property
    def pause(self) -> float:
        """How long the next attempt waits after a failure (s)."""
        return PAUSES[min(self._failures, len(PAUSES) - 1)]

    def should_try(self, now: float) -> bool:
        """Whether to try now whether it answers again; each True has to be followed by ``failed`` or ``answered``."""
        if self.up or self._trying or now < self._next:
            return False
        self._trying = True
        return True

    def answered(self) -> None:
        """It answers."""
        self.up, self._trying, self._failures = True, False, 0
