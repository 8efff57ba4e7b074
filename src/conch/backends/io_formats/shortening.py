"""Chooses the oldest messages of a conversation to drop, so that its prompt fits. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

#: The messages of a conversation, JSON objects.
Messages = Sequence[dict[str, Any]]


def shortened(messages: Messages, fits: Callable[[Messages], bool]) -> Messages | None:
    """Return the conversation without its oldest messages: as few as necessary are dropped. None if nothing fits.

    System messages at the beginning stay. The rest begins with a message of the user, or, if the last of them is
    dropped too, with another message that is not the result of a tool.
    """
    lead = next((index for index, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    roles = [message.get("role") for message in messages]
    users = [index for index in range(lead, len(messages)) if roles[index] == "user"]
    last = users[-1] if users else lead - 1
    others = [index for index in range(last + 1, len(messages)) if roles[index] != "tool"]

    def kept(start: int) -> Messages:
        return [*messages[:lead], *messages[start:]]

    for starts in (users, others):
        index = bisect_left(starts, True, key=lambda start: fits(kept(start)))
        if index < len(starts):
            return kept(starts[index])
    return None


def dropped_parts(messages: Messages, kept: Messages) -> Counter[str]:
    """Return how many parts of each type are in the messages that are not ``kept``."""
    return _parts(messages) - _parts(kept)


def _parts(messages: Messages) -> Counter[str]:
    contents = (message.get("content") for message in messages)
    return Counter(
        str(part.get("type"))
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, dict)
    )
