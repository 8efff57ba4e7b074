"""Finds stop strings in streamed text. No I/O; used by the service's thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request, shared by all of its completions."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._sorted = sorted(strings)
        self._longest = max(len(string) for string in strings)

    def search(self, text: str) -> tuple[int, int] | None:
        """Return the start and end of the leftmost stop string in ``text``; None if there is none."""
        match = None
        for string in self._strings:
            start = text.find(string)
            if start >= 0 and (match is None or start < match[0]):
                match = start, start + len(string)
        return match

    def partial_match(self, text: str) -> int:
        """Return how many characters at the end of ``text`` may be the beginning of a stop string."""
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - count :]
            # In sorted order, the strings that begin with ``end`` follow it.
            place = bisect_left(self._sorted, end)
            if place < len(self._sorted) and self._sorted[place].startswith(end):
                return count
        return 0


class StoppingText:
    """The text of a completion, released as soon as it cannot be part of a stop string."""

    __slots__ = ("_included", "_pending", "_stops", "stopped")

    def __init__(self, stops: StopStrings | None, *, included: bool = False) -> None:
        self._stops = stops
        self._included = included  # whether the stop string is part of the text
        self._pending = ""
        #: Whether a stop string has been found, which ends the text.
        self.stopped = False

    def add(self, piece: str) -> str:
        """Add text; return the text that is released."""
        if self._stops is None or not piece:
            return piece
        text = self._pending + piece
        match = self._stops.search(text)
        if match is not None:
            self.stopped = True
            self._pending = ""
            start, end = match
            return text[: end if self._included else start]
        count = self._stops.partial_match(text)
        self._pending = text[len(text) - count :]
        return text[: len(text) - count]

    def flush(self) -> str:
        """Release the remaining text at the end of the completion."""
        pending, self._pending = self._pending, ""
        return pending
