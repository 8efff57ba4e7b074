from __future__ import annotations

import pytest

from conch.backends.io_formats.shortening import dropped_parts, shortened

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def conversation(roles: str) -> list[dict[str, object]]:
    return [{"role": ROLES[role], "content": str(index)} for index, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("roles", "most", "expected"),
    [
        ("suauau", 6, "012345"),
        ("suauau", 5, "0345"),
        ("suauau", 2, "05"),
        ("suauau", 1, None),
        ("uatatau", 3, "6"),
        ("suatata", 5, "0456"),  # a result without its call is dropped too
        ("suatata", 2, "06"),
        ("aut", 1, None),
        ("s", 1, None),
    ],
)
def test_as_few_of_the_oldest_messages_as_necessary_are_dropped(roles: str, most: int, expected: str | None) -> None:
    kept = shortened(conversation(roles), lambda messages: len(messages) <= most)
    assert (None if kept is None else "".join(str(message["content"]) for message in kept)) == expected


def test_parts_of_dropped_messages_are_counted() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": [{"type": "image"}]}]
    assert dropped_parts(messages, messages[1:]) == {"image": 2, "text": 1}
