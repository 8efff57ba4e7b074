"""How large the automaton of a regular expression is, which decides how long a grammar compiler takes.

An expression such as ``.*a.{20}`` must know which of the last twenty characters were an ``a``: a million states.  Pure.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from typing import Any, Final

#: Characters that one edge matches: pairs of first and last code point, apart and in order.
Ranges = tuple[tuple[int, int], ...]

_LAST: Final = 0x10FFFF
#: Steps after which an expression counts as too large, whatever it turns out to be: a tenth of a second.
_MOST_STEPS: Final = 100_000
_CLASSES: Final[dict[str, Ranges]] = {
    "CATEGORY_DIGIT": ((48, 57),),
    "CATEGORY_SPACE": ((9, 13), (32, 32)),
    "CATEGORY_WORD": ((48, 57), (65, 90), (95, 95), (97, 122)),
}


def has_at_most(states: int, expression: str) -> bool:
    """Whether the deterministic automaton of an expression has at most so many states.

    True for one that Python cannot read, which is for the compiler to say.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree: Any = re._parser.parse(expression)  # type: ignore[attr-defined]
        nfa = _Nfa(8 * states)
        end = nfa.add(tree, 0)
        nfa.accepting = end
        return nfa.determined(states)
    except _TooLarge:
        return False
    except (re.error, OverflowError, RecursionError):
        return True


class _TooLarge(Exception):
    """There are more states, or more work, than was allowed."""


class _Nfa:
    """States by number; 0 is the first.  ``edges`` consume a character, ``jumps`` none."""

    def __init__(self, most: int) -> None:
        self.edges: list[list[tuple[Ranges, int]]] = [[]]
        self.jumps: list[list[int]] = [[]]
        self.accepting = 0
        self._most = most

    def add(self, tree: Any, start: int) -> int:
        """Add what an expression matches from ``start`` on; returns the state behind it."""
        for operation, value in tree:
            start = self._add(str(operation), value, start)
        return start

    def determined(self, most: int) -> bool:
        """Whether at most ``most`` sets of states can be reached together."""
        bounds = sorted({bound for edges in self.edges for ranges, _ in edges for low, high in ranges
                         for bound in (low, high + 1)})  # fmt: skip
        atoms: dict[Ranges, range | list[int]] = {}
        first = self._closed({0})
        seen, left, steps = {first}, [first], 0
        while left:
            reached: dict[int, set[int]] = {}
            for state in left.pop():
                for ranges, target in self.edges[state]:
                    if ranges not in atoms:
                        atoms[ranges] = [
                            atom
                            for low, high in ranges
                            for atom in range(bisect_right(bounds, low), bisect_right(bounds, high) + 1)
                        ]
                    for atom in atoms[ranges]:
                        reached.setdefault(atom, set()).add(target)
                    steps += len(atoms[ranges])
            for states in {frozenset(found) for found in reached.values()}:
                closed = self._closed(states)
                steps += len(closed)
                if closed not in seen:
                    seen.add(closed)
                    left.append(closed)
            if len(seen) > most or steps > _MOST_STEPS:
                return False
        return True

    def _closed(self, states: Any) -> frozenset[int]:
        closed, left = set(states), list(states)
        while left:
            for target in self.jumps[left.pop()]:
                if target not in closed:
                    closed.add(target)
                    left.append(target)
        return frozenset(closed)

    def _state(self) -> int:
        if len(self.edges) > self._most:
            raise _TooLarge
        self.edges.append([])
        self.jumps.append([])
        return len(self.edges) - 1

    def _edge(self, start: int, ranges: Ranges) -> int:
        end = self._state()
        self.edges[start].append((ranges, end))
        return end

    def _add(self, operation: str, value: Any, start: int) -> int:
        match operation:
            case "LITERAL":
                return self._edge(start, ((value, value),))
            case "NOT_LITERAL":
                return self._edge(start, _without(((value, value),)))
            case "ANY":
                return self._edge(start, _without(((10, 10),)))
            case "IN":
                return self._edge(start, _class(value))
            case "SUBPATTERN":
                return self.add(value[-1], start)
            case "ATOMIC_GROUP":
                return self.add(value, start)
            case "BRANCH":
                end = self._state()
                for branch in value[1]:
                    self.jumps[self.add(branch, start)].append(end)
                return end
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, most, tree = value
                return self._repeated(least, most, tree, start)
        return start  # places, such as the beginning of a line

    def _repeated(self, least: int, most: Any, tree: Any, start: int) -> int:
        for _ in range(least):
            start = self.add(tree, start)
        end = self._state()
        self.jumps[start].append(end)
        if str(most) == "MAXREPEAT":
            again = self._state()
            self.jumps[start].append(again)
            back = self.add(tree, again)
            self.jumps[back] += [again, end]
            return end
        for _ in range(int(most) - least):
            start = self.add(tree, start)
            self.jumps[start].append(end)
        return end


def _class(members: Any) -> Ranges:
    ranges: list[tuple[int, int]] = []
    inverted = False
    for operation, value in members:
        match str(operation):
            case "NEGATE":
                inverted = True
            case "LITERAL":
                ranges.append((value, value))
            case "RANGE":
                ranges.append((value[0], value[1]))
            case "CATEGORY":
                name = str(value)
                known = _CLASSES.get(name.replace("_NOT_", "_"), ())
                ranges += _without(known) if "_NOT_" in name else known
    merged = tuple(sorted(ranges))
    return _without(merged) if inverted else merged


def _without(ranges: Ranges) -> Ranges:
    """All characters but these."""
    rest: list[tuple[int, int]] = []
    low = 0
    for first, last in sorted(ranges):
        if low < first:
            rest.append((low, first - 1))
        low = max(low, last + 1)
    return (*rest, (low, _LAST)) if low <= _LAST else tuple(rest)
