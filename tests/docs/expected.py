"""Compares output with what a page shows of it: ``…`` is anything, and numbers may differ in their last digits."""

from __future__ import annotations

import re
from math import isclose

_NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")
#: How far results of other processors may be from those on the page.
_RELATIVE, _ABSOLUTE = 0.02, 0.005


def shows(page: str, output: str) -> bool:
    """Whether the whole ``output`` is what the page shows."""
    return _matches(page, re.fullmatch(_pattern(page), output.strip()))


def appears(page: str, output: str) -> bool:
    """Whether what the page shows is somewhere in ``output``."""
    return _matches(page, re.search(_pattern(page), output))


def _pattern(page: str) -> str:
    parts = ("".join(_literally(part)) for part in _parts(page))
    return "(?s:.*?)".join(parts)


def _parts(page: str) -> list[str]:
    """What stands between the gaps; the blank before one may be there for the eye alone."""
    return re.split(" ?…", page.strip())


def _literally(text: str) -> list[str]:
    at, parts = 0, []
    for number in _NUMBER.finditer(text):
        parts += [re.escape(text[at : number.start()]), f"({_NUMBER.pattern})"]
        at = number.end()
    return [*parts, re.escape(text[at:])]


def _matches(page: str, match: re.Match[str] | None) -> bool:
    if match is None:
        return False
    shown = [number for part in _parts(page) for number in _NUMBER.findall(part)]
    return all(
        isclose(float(one), float(other), rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
        for one, other in zip(shown, match.groups(), strict=True)
    )
