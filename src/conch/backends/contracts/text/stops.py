"""Stop strings: where generated text ends, however tokens and strings cut each other.

Pure; used by the thread that runs the engine, one object per sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class StopStrings:
    """What a request's stop strings have in common for all of its sequences."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._sorted = sorted(strings)
        self._longest = max(len(string) for string in strings)

    def search(self, text: str) -> tuple[int, int] | None:
        """Where the first of the strings in ``text``, from the left, begins and ends."""
        found = None
        for string in self._strings:
            start = text.find(string)
            if start >= 0 and (found is None or start < found[0]):
                found = start, start + len(string)
        return found

    def held(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the beginning of a string."""
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - count :]
            # The strings that begin with it follow it in their order.
            place = bisect_left(self._sorted, end)
            if place < len(self._sorted) and self._sorted[place].startswith(end):
                return count
        return 0


class StoppingText:
    """Text that arrives in pieces and goes out as far as it cannot be part of a stop string any more."""

    __slots__ = ("_held", "_included", "_stops", "stopped")

    def __init__(self, stops: StopStrings | None, *, included: bool = False) -> None:
        self._stops = stops
        self._included = included  # the string that stops is part of the text
        self._held = ""
        #: Whether a stop string has been found; nothing comes out after it.
        self.stopped = False

    def add(self, piece: str) -> str:
        """The text that is certain now."""
        if self._stops is None or not piece:
            return piece
        text = self._held + piece
        found = self._stops.search(text)
        if found is not None:
            self.stopped = True
            self._held = ""
            start, end = found
            return text[: end if self._included else start]
        held = self._stops.held(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held
