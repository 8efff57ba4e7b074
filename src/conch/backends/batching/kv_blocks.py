"""The blocks of a paged KV cache: assigns blocks to slots, and shares full blocks between slots. No I/O.

A block belongs to every slot that shares it. Slots share only blocks that are full, so that no slot writes into a block
of another. A retained slot has no running sequence; its blocks are kept for prompts with the same beginning until they
are needed.
"""

from __future__ import annotations


class KvBlocks:
    """A cache of ``count`` blocks with ``size`` tokens each."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._free = list(range(count - 1, -1, -1))
        self._users = [0] * count
        # The users that are not retained.
        self._pins = [0] * count
        self._pinned = 0
        self._slots: dict[int, list[int]] = {}
        self._retained: set[int] = set()

    @property
    def pinned(self) -> int:
        """The number of blocks that at least one slot uses that is not retained."""
        return self._pinned

    @property
    def free(self) -> int:
        """The number of blocks that no slot uses."""
        return len(self._free)

    def blocks(self, slot: int) -> list[int]:
        """Return the blocks of a slot in order; the caller must not change the list."""
        return self._slots.get(slot, [])

    def unpinned(self, slot: int, tokens: int) -> int:
        """Return how many of the full blocks of the first ``tokens`` tokens only retained slots use."""
        return sum(not self._pins[block] for block in self.blocks(slot)[: tokens // self.size])

    def retain(self, slot: int) -> None:
        """Keep the blocks of a slot whose sequence has ended."""
        self._retained.add(slot)
        for block in self.blocks(slot):
            self._unpin(block)

    def resume(self, slot: int) -> None:
        """Let a sequence continue a retained slot."""
        self._retained.remove(slot)
        for block in self.blocks(slot):
            self._pin(block)

    def reserve(self, slot: int, tokens: int) -> bool:
        """Extend a slot to hold ``tokens`` tokens in all; returns False, without a change, if the cache is full."""
        held = self._slots.get(slot, [])
        missing = -(-tokens // self.size) - len(held)
        if missing > len(self._free):
            return False
        if missing > 0:
            self._slots.setdefault(slot, held).extend(self._take() for _ in range(missing))
        return True

    def share(self, source: int, target: int, tokens: int) -> tuple[bool, tuple[int, int] | None]:
        """Let the unused slot ``target`` begin with the first ``tokens`` tokens of ``source``.

        Returns whether there was room. If ``tokens`` end within a block, also returns the block of ``source`` and the
        block of ``target`` that must get a copy of it.
        """
        full, rest = divmod(tokens, self.size)
        if rest and not self._free:
            return False, None
        held = self._slots[source]
        for block in held[:full]:
            self._users[block] += 1
            self._pin(block)
        self._slots[target] = held[:full]
        if not rest:
            return True, None
        copy = self._take()
        self._slots[target].append(copy)
        return True, (held[full], copy)

    def truncate(self, slot: int, tokens: int) -> None:
        """Free the blocks after the first ``tokens`` tokens of a slot; 0 frees the slot."""
        held = self._slots.get(slot, [])
        kept = -(-tokens // self.size)
        for block in reversed(held[kept:]):
            if slot not in self._retained:
                self._unpin(block)
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
        del held[kept:]
        if not held:
            self._slots.pop(slot, None)
            self._retained.discard(slot)

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        self._pin(block)
        return block

    def _pin(self, block: int) -> None:
        self._pinned += not self._pins[block]
        self._pins[block] += 1

    def _unpin(self, block: int) -> None:
        self._pins[block] -= 1
        self._pinned -= not self._pins[block]
