"""A decoder without a network: its logits are a function of all tokens that the KV cache holds for a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conch.backends.batching.decoder import Chunk, Decoder, Logits, SavedTokens

_PRIME = (1 << 61) - 1


def logits_after(tokens: Sequence[int], vocabulary: int, adapter: str = "") -> Logits:
    """Return the logits ``[vocabulary]`` after a sequence."""
    state = len(adapter) + 1
    for position, token in enumerate(tokens):
        state = (state * 1_000_003 + token * 7919 + position) % _PRIME
    return np.random.default_rng(state).standard_normal(vocabulary, np.float32)


class FakeDecoder(Decoder):
    """Keeps the tokens of each block, and asserts that the blocks and slots of its caller are right.

    ``runs`` are the chunks of each run. ``seconds`` returns the duration of a run, by which ``now`` advances.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 31,
        context: int = 512,
        slots: int = 64,
        blocks: int = 256,
        block_tokens: int = 4,
        batched_tokens: int = 64,
        rewinds: bool = True,
        adapters: tuple[str, ...] = (),
        seconds: Callable[[Sequence[Chunk]], float] = lambda chunks: 0.0,
    ) -> None:
        self.block_tokens = block_tokens  # type: ignore[misc]
        self.vocabulary, self.context, self.slots, self.blocks = vocabulary, context, slots, blocks
        self.batched_tokens, self.rewinds, self.adapters = batched_tokens, rewinds, adapters
        self.runs: list[list[Chunk]] = []
        self.now = 0.0
        self.closed = False
        self._seconds = seconds
        #: The adapter and token of each position of each block (None: not written).
        self._cells: list[list[Any]] = [[None] * block_tokens for _ in range(blocks)]
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    @property
    def lengths(self) -> dict[int, int]:
        """The number of tokens by slot."""
        return dict(self._lengths)

    def run(self, chunks: Sequence[Chunk], adapter: str = "") -> Logits:
        assert chunks
        assert len({chunk.slot for chunk in chunks}) == len(chunks)
        assert sum(len(chunk.tokens) for chunk in chunks) <= self.batched_tokens
        self.runs.append(list(chunks))
        self.now += self._seconds(chunks)
        rows = [row for chunk in chunks for row in self._read(chunk, adapter)]
        return np.array(rows, np.float32).reshape(-1, self.vocabulary)

    def share(self, source: int, target: int, tokens: int, copied: tuple[int, int] | None) -> None:
        assert self.rewinds
        assert target not in self._lengths
        assert 0 < tokens <= self._lengths[source]
        full, rest = divmod(tokens, self.block_tokens)
        table = self._tables[source][:full]
        assert bool(rest) == (copied is not None)
        if copied is not None:
            before, after = copied
            assert before == self._tables[source][full]
            self._assert_unused(after)
            self._cells[after] = list(self._cells[before])
            table.append(after)
        self._tables[target], self._lengths[target] = table, tokens

    def truncate(self, slot: int, tokens: int) -> None:
        length = self._lengths.get(slot, 0)
        assert tokens <= length
        assert self.rewinds or tokens in (0, length)
        if tokens:
            self._lengths[slot] = tokens
            del self._tables[slot][-(-tokens // self.block_tokens) :]
        else:
            self._lengths.pop(slot, None)
            self._tables.pop(slot, None)

    def save(self, slot: int) -> SavedTokens | None:
        tokens = self._lengths[slot]
        return SavedTokens(tokens, (tokens, [list(self._cells[block]) for block in self._tables[slot]]))

    def restore(self, slot: int, saved: SavedTokens, tokens: int, blocks: Sequence[int]) -> bool:
        assert slot not in self._lengths
        length, cells = saved.content
        assert tokens <= length
        for block, values in zip(blocks, cells[: -(-tokens // self.block_tokens)], strict=True):
            self._assert_unused(block)
            self._cells[block] = list(values)
        self._tables[slot], self._lengths[slot] = list(blocks), tokens
        return True

    def close(self) -> None:
        self.closed = True

    def compute(self, tokens: list[int], wanted: int, adapter: str) -> list[Logits]:
        """Return the logits after each of the last ``wanted`` tokens of a sequence."""
        lengths = range(len(tokens) - wanted + 1, len(tokens) + 1)
        return [logits_after(tokens[:length], self.vocabulary, adapter) for length in lengths]

    def _read(self, chunk: Chunk, adapter: str) -> list[Logits]:
        size, end = self.block_tokens, chunk.start + len(chunk.tokens)
        assert 0 <= chunk.slot < self.slots
        assert chunk.start == self._lengths.get(chunk.slot, 0)
        assert 0 <= chunk.wanted <= len(chunk.tokens)
        assert end <= self.context
        assert len(chunk.blocks) == -(-end // size)
        table = self._tables.pop(chunk.slot, [])
        held = -(-chunk.start // size)
        assert list(chunk.blocks[:held]) == table[:held]
        for block in chunk.blocks[held:]:
            self._assert_unused(block)
        for position, token in enumerate(chunk.tokens, chunk.start):
            block = chunk.blocks[position // size]
            assert not any(block in other for other in self._tables.values())
            self._cells[block][position % size] = adapter, token
        self._tables[chunk.slot], self._lengths[chunk.slot] = list(chunk.blocks), end
        cells = [self._cells[chunk.blocks[position // size]][position % size] for position in range(end)]
        assert {name for name, _ in cells} == {adapter}
        return self.compute([token for _, token in cells], chunk.wanted, adapter)

    def _assert_unused(self, block: int) -> None:
        assert not any(block in table for table in self._tables.values())
        self._cells[block] = [None] * self.block_tokens
