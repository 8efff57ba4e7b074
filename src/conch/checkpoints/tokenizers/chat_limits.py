"""Limits of the processor time and the text size of rendering a chat template.

jinja2's sandbox prevents access to Python, but allows unlimited nested loops, multiplied texts and nested lists.
``chat_environment.py`` therefore calls this module in every loop iteration and before every operation that enlarges a
text. Limits apply per thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any, Final

#: Default of the parameter ``chat_template_timeout`` (s of processor time).
SECONDS: Final = 5.0
#: The maximum number of characters in one text, and in all texts of a rendering.
MAX_TEXT: Final = 64 << 20
MAX_ALL_TEXT: Final = 1 << 30
#: The maximum number of characters in a template; real templates have tens of thousands.
MAX_TEMPLATE: Final = 1 << 20
#: The number of characters that an element of a list counts as.
_ELEMENT: Final = 8


class TooMuch(Exception):
    """A rendering exceeds a limit; the message names the limit."""


class _Rendering(threading.local):
    """The limits of the calling thread's rendering.

    ``end`` is a deadline in the thread's processor time; ``left`` is the remaining number of characters.
    """

    end = float("inf")
    seconds = SECONDS
    left = MAX_ALL_TEXT


_rendering: Final = _Rendering()


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Limit the rendering of the calling thread within the context; ``seconds`` are of processor time."""
    _rendering.seconds, _rendering.end, _rendering.left = seconds, thread_time() + seconds, MAX_ALL_TEXT
    try:
        yield
    finally:
        _rendering.end, _rendering.left = float("inf"), MAX_ALL_TEXT


def tick() -> None:
    """Raise :class:`TooMuch` if the processor time is exhausted."""
    if thread_time() > _rendering.end:
        raise TooMuch(
            f"it takes more than {_rendering.seconds:g} seconds of processor time (parameter 'chat_template_timeout')"
        )


def charge(characters: float) -> None:
    """Charge for a text before it is created. Raises :class:`TooMuch` if it exceeds a limit."""
    _rendering.left -= characters  # type: ignore[assignment]
    if characters > MAX_TEXT or _rendering.left < 0:
        raise TooMuch(f"it makes texts of more than {MAX_TEXT} characters, or {MAX_ALL_TEXT} in all")
    tick()


def size_of(value: Any) -> int:
    """Estimate the number of characters of ``value`` as text; a nested list counts at each occurrence."""
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | dict | set):
        return _ELEMENT
    size, waiting = 0, [value]
    while waiting and size <= MAX_TEXT:
        container = waiting.pop()
        elements = [*container, *container.values()] if isinstance(container, dict) else container
        size += _ELEMENT * (1 + len(elements))
        for element in elements:
            if isinstance(element, str | bytes):
                size += len(element)
            elif isinstance(element, list | tuple | dict | set):
                waiting.append(element)
    return size


def charge_product(left: Any, right: Any) -> None:
    """Charge for ``left * right``: a repeated text or list, or a number."""
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(many, str | bytes | list | tuple):
            charge(len(many) * max(times, 0) * (1 if isinstance(many, str | bytes) else _ELEMENT))
    if isinstance(left, int) and isinstance(right, int):
        charge((left.bit_length() + right.bit_length()) / _ELEMENT)


def charge_power(left: Any, right: Any) -> None:
    """Raise :class:`TooMuch` if ``left ** right`` is a huge integer, which is slow to compute."""
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 1 << 16:
        raise TooMuch("it computes a number of more than 65536 bits")


def charge_sum(left: Any, right: Any) -> None:
    """Charge for ``left + right`` of texts or lists."""
    if isinstance(left, str) and isinstance(right, str):
        charge(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        charge(_ELEMENT * (len(left) + len(right)))
