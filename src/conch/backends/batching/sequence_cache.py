"""The sequences in a decoder's KV cache: running ones, and those retained for prompts with the same beginning.

When a sequence ends or is preempted, its slot is retained with the tokens that the cache holds. A later prompt with the
same beginning shares these tokens instead of computing them. Retained slots are shortened from the end, the least
recently used first, as soon as a running sequence needs their blocks or they exceed the decoder's limit. A decoder that
saves tokens keeps a copy of a retained slot outside the cache instead, and a later prompt gets it back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

from conch.backends.batching.decoder import Decoder, SavedTokens
from conch.backends.batching.kv_blocks import KvBlocks
from conch.backends.batching.prefixes import PrefixIndex


class SequenceCache:
    """The slots and blocks of ``decoder``.

    Sequences share whole units of ``unit`` tokens, a multiple of the decoder's block. ``retains`` tells whether ended
    sequences are retained at all. Only sequences of the same ``key`` share tokens.
    """

    def __init__(self, decoder: Decoder, unit: int, *, retains: bool) -> None:
        self.retains = retains
        self._decoder = decoder
        self._blocks = KvBlocks(decoder.blocks, decoder.block_tokens)
        most = decoder.retained_tokens
        self._retained_blocks = decoder.blocks if most is None else self.blocks_for(most)
        self._free_slots = list(range(decoder.slots - 1, -1, -1))
        self._prefixes = PrefixIndex(unit)
        self._retained: OrderedDict[int, None] = OrderedDict()  # the least recently used slot first
        # By negative numbers, which the index has in place of slots; the least recently used first.
        self._saved: OrderedDict[int, SavedTokens] = OrderedDict()
        self._saved_bytes = 0
        self._saved_numbers = count(-2, -1)

    @property
    def running_tokens(self) -> int:
        """The size of the blocks that running sequences use (tokens)."""
        return self._blocks.pinned * self._blocks.size

    def blocks(self, slot: int) -> list[int]:
        """Return the blocks of a slot in order; the caller must not change the list."""
        return self._blocks.blocks(slot)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that ``tokens`` tokens need."""
        return -(-tokens // self._blocks.size)

    def known(self, key: str, tokens: Sequence[int]) -> int:
        """Return how many of ``tokens`` a sequence that begins with them would not have to compute."""
        return self._prefixes.find(key, tokens)[1]

    def start(self, key: str, shareable: Sequence[int], length: int, blocks: int) -> tuple[int, int] | None:
        """Give a sequence of ``length`` tokens a slot with room for one more, which begins with a known prefix.

        ``shareable`` are the tokens at the beginning of the sequence that it may share with others. Returns the slot
        and the number of its tokens in the cache, or None if running sequences leave the sequence less than ``blocks``
        blocks.
        """
        source, known = self._prefixes.find(key, shareable)
        if source in self._saved:
            if blocks > self._blocks.count - self._blocks.pinned:
                return None
            source, known = self._restore(source, key, shareable[:known])
        elif known and not self._decoder.holds(source, known):
            source, known = -1, 0
        reused = known // self._blocks.size
        available = self._blocks.count - self._blocks.pinned - self._blocks.unpinned(source, known)
        if blocks - reused > available:
            return None
        if source in self._retained:
            self._retained.move_to_end(source)
        slot = self._take_slot(source, known)
        if known and slot != source:
            self._blocks.share(source, slot, known)
            self._decoder.share(source, slot, known, None)
        self.grow(slot, length + 1)
        return slot, known

    def grow(self, slot: int, tokens: int) -> bool:
        """Make room for ``tokens`` tokens of a slot in all; returns False if running sequences occupy the cache."""
        if self._blocks.reserve(slot, tokens):
            return True
        return self._make_room(self.blocks_for(tokens) - len(self._blocks.blocks(slot))) and self._blocks.reserve(
            slot, tokens
        )

    def fork(self, source: int, tokens: int) -> int | None:
        """Return a new slot that begins with the first ``tokens`` tokens of ``source``; None if there is no room."""
        if tokens % self._blocks.size and not self._make_room(1):
            return None
        slot = self._take_slot()
        _, copied = self._blocks.share(source, slot, tokens)
        self._decoder.share(source, slot, tokens, copied)
        return slot

    def record(self, slot: int, key: str, tokens: Sequence[int], count: int) -> None:
        """Record that other sequences may share the first ``count`` of ``tokens``, which the slot holds."""
        if self.retains:
            self._prefixes.extend(slot, key, tokens, count)

    def release(self, slot: int) -> None:
        """Free the slot of a sequence that ends, or retain its recorded tokens if no other slot has them."""
        kept = self._prefixes.length(slot)
        if not kept or self._prefixes.repeated(slot):
            self.free(slot)
            return
        self.shorten(slot, kept)
        self._blocks.retain(slot)
        self._retained[slot] = None
        self._make_room(self._blocks.count - self._blocks.pinned - self._retained_blocks)

    def free(self, slot: int) -> None:
        """Free a slot and the blocks that no other slot uses."""
        self.shorten(slot, 0)
        self._free_slots.append(slot)

    def shorten(self, slot: int, tokens: int) -> None:
        """Keep only the first ``tokens`` tokens of a slot, and the blocks that hold them."""
        self._prefixes.truncate(slot, tokens)
        self._blocks.truncate(slot, tokens)
        self._decoder.truncate(slot, tokens)

    def clear(self) -> None:
        """Free all retained slots, and forget what was saved."""
        while self._retained:
            self.free(self._retained.popitem()[0])
        while self._saved:
            self._forget(next(iter(self._saved)))

    def _take_slot(self, source: int = -1, known: int = 0) -> int:
        """Return an unused slot, or ``source`` if it is retained and would lose nothing, or is the only choice."""
        if source in self._retained and (known == self._prefixes.length(source) or not self._others(source)):
            del self._retained[source]
            self.shorten(source, known)
            self._blocks.resume(source)
            return source
        if not self._free_slots:
            self._evict()
        return self._free_slots.pop()

    def _others(self, source: int) -> bool:
        """Whether a slot other than ``source`` is free or retained."""
        return bool(self._free_slots) or len(self._retained) > 1

    def _make_room(self, blocks: int) -> bool:
        """Shorten or evict retained slots until ``blocks`` blocks are free; returns False if that is not possible."""
        cache = self._blocks
        if blocks > cache.count - cache.pinned:
            return False
        while cache.free < blocks:
            slot = next(iter(self._retained))
            held = len(cache.blocks(slot)) - (blocks - cache.free)
            kept = max(held, 0) * cache.size // self._prefixes.unit * self._prefixes.unit
            if kept and not self._decoder.saved_bytes:
                self.shorten(slot, kept)
            else:
                self._evict()
        return True

    def _evict(self) -> None:
        """Free the least recently used retained slot; its tokens are saved if the decoder can."""
        slot = self._retained.popitem(last=False)[0]
        if self._decoder.saved_bytes and not self._prefixes.repeated(slot) and (saved := self._decoder.save(slot)):
            number = next(self._saved_numbers)
            for covered in self._prefixes.move(slot, number):
                if covered in self._saved:
                    self._forget(covered)
            self._saved[number] = saved
            self._saved_bytes += saved.size
            while self._saved_bytes > self._decoder.saved_bytes:
                self._forget(next(iter(self._saved)))
        self.free(slot)

    def _restore(self, number: int, key: str, tokens: Sequence[int]) -> tuple[int, int]:
        """Copy ``tokens``, the beginning of those saved under a number, to a retained slot.

        Returns the slot and the number of its tokens, or (-1, 0) if that is not possible.
        """
        saved, length = self._saved[number], len(tokens)
        self._saved.move_to_end(number)
        slot = self._take_slot()
        if not self.grow(slot, length) or not self._decoder.restore(slot, saved, length, self._blocks.blocks(slot)):
            self.free(slot)
            return -1, 0
        self._prefixes.extend(slot, key, tokens, length)
        self._blocks.retain(slot)
        self._retained[slot] = None
        return slot, length

    def _forget(self, number: int) -> None:
        self._saved_bytes -= self._saved.pop(number).size
        self._prefixes.truncate(number, 0)
