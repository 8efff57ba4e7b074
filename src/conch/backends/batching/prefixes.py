"""An index of the sequences in a KV cache by their beginnings. No I/O.

The index is a tree. An edge is a unit of tokens, so that a node represents a prefix of whole units and has the slots of
all sequences with this prefix. Each key has a tree, for an adapter, on which the cache of a sequence depends, and for
the salt of a client.
"""

from __future__ import annotations

from collections.abc import Sequence

_Unit = tuple[int, ...]


class _Node:
    __slots__ = ("children", "key", "parent", "slots", "unit")

    def __init__(self, parent: _Node | None, unit: _Unit, key: str) -> None:
        self.parent, self.unit, self.key = parent, unit, key
        self.children: dict[_Unit, _Node] = {}
        self.slots: set[int] = set()


class PrefixIndex:
    """The beginnings of slots, in units of ``unit`` tokens."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self._roots: dict[str, _Node] = {}
        self._ends: dict[int, tuple[_Node, int]] = {}

    def extend(self, slot: int, key: str, tokens: Sequence[int], count: int) -> None:
        """Record the first ``count`` of ``tokens``, which begin with the recorded tokens of the slot."""
        node, end = self._ends.get(slot, (None, 0))
        if end + self.unit > count:
            return
        if node is None:
            node = self._roots.setdefault(key, _Node(None, (), key))
        while end + self.unit <= count:
            unit = tuple(tokens[end : end + self.unit])
            child = node.children.get(unit)
            if child is None:
                child = node.children[unit] = _Node(node, unit, key)
            child.slots.add(slot)
            node, end = child, end + self.unit
        self._ends[slot] = node, end

    def length(self, slot: int) -> int:
        """Return the number of recorded tokens of a slot."""
        return self._ends[slot][1] if slot in self._ends else 0

    def find(self, key: str, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the highest slot with the longest common beginning and its length, less than that of ``tokens``.

        The length is 0 if no slot begins with the first unit of ``tokens``.
        """
        node, end = self._roots.get(key), 0
        while node is not None and end + self.unit < len(tokens):
            child = node.children.get(tuple(tokens[end : end + self.unit]))
            if child is None:
                break
            node, end = child, end + self.unit
        return (max(node.slots), end) if node is not None and end else (-1, 0)

    def move(self, slot: int, target: int) -> list[int]:
        """Record the tokens of ``slot`` for ``target`` instead.

        Returns the others that have all or some of these tokens, and no more.
        """
        self._ends[target] = self._ends.pop(slot)
        node = self._ends[target][0]
        covered: list[int] = []
        while node.parent is not None:
            node.slots.remove(slot)
            covered += [other for other in node.slots if self._ends[other][0] is node]
            node.slots.add(target)
            node = node.parent
        return covered

    def repeated(self, slot: int) -> bool:
        """Whether another slot begins with all recorded tokens of this slot."""
        end = self._ends.get(slot)
        return end is not None and len(end[0].slots) > 1

    def truncate(self, slot: int, tokens: int) -> None:
        """Keep at most the first ``tokens`` tokens of a slot; 0 removes it."""
        node, end = self._ends.get(slot, (None, 0))
        while node is not None and node.parent is not None and end > tokens:
            node.slots.remove(slot)
            if not node.slots:
                del node.parent.children[node.unit]
            node, end = node.parent, end - self.unit
        if node is not None and end:
            self._ends[slot] = node, end
        else:
            self._ends.pop(slot, None)
            if node is not None and not node.children:
                del self._roots[node.key]


def common_length(tokens: Sequence[int], others: Sequence[int], unit: int) -> int:
    """Return the length of the common beginning in whole units; less than the length of ``tokens``."""
    end = 0
    while (
        end + unit < len(tokens) and end + unit <= len(others) and tokens[end : end + unit] == others[end : end + unit]
    ):
        end += unit
    return end
