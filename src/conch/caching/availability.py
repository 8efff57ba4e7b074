"""Decides when to use a remote service that may fail.  A pure state machine that takes the time as an argument."""

from __future__ import annotations

from typing import Final

#: Seconds before each attempt after a failed one; the last one repeats.
PAUSES: Final = (1.0, 2.0, 5.0, 10.0, 30.0)


class Availability:
    """Whether a service works.

    A single call may fail by chance, because of a stale connection or a busy event loop.  The service is then not used
    until an attempt, which is due at once, has ended.  If the attempt fails too, the service counts as down.
    """

    def __init__(self) -> None:
        #: Whether to use it.
        self.up = True
        self._next = 0.0
        self._attempting = False
        self._failed_attempts = 0

    def failed(self, now: float) -> None:
        """A call failed at ``now`` (s)."""
        if self.up:
            self.up = False
            self._next = now

    def should_attempt(self, now: float) -> bool:
        """Whether to make an attempt now; after each True, call ``attempt_failed`` or ``attempt_succeeded``."""
        if self.up or self._attempting or now < self._next:
            return False
        self._attempting = True
        return True

    def attempt_failed(self, now: float) -> float:
        """An attempt failed at ``now`` (s).  Returns the pause before the next one (s) if it is the first, else 0."""
        pause = PAUSES[min(self._failed_attempts, len(PAUSES) - 1)]
        self._attempting = False
        self._failed_attempts += 1
        self._next = now + pause
        return pause if self._failed_attempts == 1 else 0.0

    def attempt_succeeded(self) -> bool:
        """An attempt succeeded.  Returns whether it was down."""
        was_down = self._failed_attempts > 0
        self.up, self._attempting, self._failed_attempts = True, False, 0
        return was_down
