"""How much processor time a chat template may take to render a conversation, and how much text it may make meanwhile.

jinja2's sandbox keeps templates from Python; it lets them loop within loops, multiply texts and nest lists without end.
``chat_environment.py`` counts here what could grow, at every turn of a loop and before any text is made longer.  A
rendering belongs to the thread that it runs on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any, Final

#: Default of the parameter ``chat_template_timeout`` (s of processor time).
SECONDS: Final = 5.0
#: Characters of a text that a template makes, and of all texts that it makes in one rendering.
MAX_TEXT: Final = 64 << 20
MAX_ALL_TEXT: Final = 1 << 30
#: Characters of a template itself; real ones have tens of thousands.
MAX_TEMPLATE: Final = 1 << 20
#: What an element of a list counts for, in characters.
_ELEMENT: Final = 8


class TooMuch(Exception):
    """A rendering went beyond its limits; the message says beyond which."""


class _Rendering(threading.local):
    """The rendering of the calling thread: the thread's processor time when it has to be done, and the characters that
    it may still make."""

    end = float("inf")
    seconds = SECONDS
    left = MAX_ALL_TEXT


_rendering: Final = _Rendering()


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Limit what the calling thread renders within."""
    _rendering.seconds, _rendering.end, _rendering.left = seconds, thread_time() + seconds, MAX_ALL_TEXT
    try:
        yield
    finally:
        _rendering.end, _rendering.left = float("inf"), MAX_ALL_TEXT


def tick() -> None:
    """Raise :class:`TooMuch` when the time is used up."""
    if thread_time() > _rendering.end:
        raise TooMuch(
            f"it takes more than {_rendering.seconds:g} seconds of processor time (parameter 'chat_template_timeout')"
        )


def charge(characters: float) -> None:
    """Count a text that is about to be made.  Raises :class:`TooMuch` where it is too long, or there were too many."""
    _rendering.left -= characters  # type: ignore[assignment]
    if characters > MAX_TEXT or _rendering.left < 0:
        raise TooMuch(f"it makes texts of more than {MAX_TEXT} characters, or {MAX_ALL_TEXT} in all")
    tick()


def size_of(value: Any) -> int:
    """Roughly the characters that ``value`` has as text; of lists in lists, each as often as it is written out."""
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | dict | set):
        return _ELEMENT
    size, waiting = 0, [value]
    while waiting and size <= MAX_TEXT:
        one = waiting.pop()
        elements = [*one, *one.values()] if isinstance(one, dict) else one
        size += _ELEMENT * (1 + len(elements))
        for element in elements:
            if isinstance(element, str | bytes):
                size += len(element)
            elif isinstance(element, list | tuple | dict | set):
                waiting.append(element)
    return size


def charge_product(left: Any, right: Any) -> None:
    """Count what ``left * right`` makes: a text or a list so many times, or a number."""
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(many, str | bytes | list | tuple):
            charge(len(many) * max(times, 0) * (1 if isinstance(many, str | bytes) else _ELEMENT))
    if isinstance(left, int) and isinstance(right, int):
        charge((left.bit_length() + right.bit_length()) / _ELEMENT)


def charge_power(left: Any, right: Any) -> None:
    """Count what ``left ** right`` makes, where that is a whole number: slower to compute than to write down."""
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 1 << 16:
        raise TooMuch("it computes a number of more than 65536 bits")


def charge_sum(left: Any, right: Any) -> None:
    """Count what ``left + right`` makes."""
    if isinstance(left, str) and isinstance(right, str):
        charge(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        charge(_ELEMENT * (len(left) + len(right)))
