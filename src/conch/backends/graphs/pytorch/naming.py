"""Which of forward's arguments and results the tensors of a configuration are, by Triton's naming rules.

Inputs are named as arguments, or ``<name>__<index>``, or stand in the order of the arguments; outputs likewise, except
that results have no names unless they are a dictionary's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_INDEXED: Final = re.compile(r".+__(\d+)")


def indices(names: Sequence[str], known: Sequence[str]) -> list[int]:
    """The place of each of ``names``: among the ``known`` ones, by its number, or its place among ``names``.

    All names must follow one rule; where they do not, their order counts.
    """
    if known and all(name in known for name in names):
        return [known.index(name) for name in names]
    numbered = [_INDEXED.fullmatch(name) for name in names]
    if all(numbered):
        return [int(found[1]) for found in numbered if found is not None]
    return list(range(len(names)))
