"""Prefix caching: stores keys and values of earlier prompts in blocks, for prompts with the same prefix."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

from conch.backends.engines.transformers.cache import PaddedCache

#: Tokens per block.
BLOCK: Final = 32

_Piece = list[list[Any]]


class Prefixes:
    """The most recently used blocks, up to ``limit`` bytes; the key of a block covers all tokens up to its end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: OrderedDict[bytes, _Piece] = OrderedDict()
        self._bytes = 0
        self.queries = self.hits = 0

    @property
    def tokens(self) -> int:
        return BLOCK * len(self._blocks)

    def find(self, adapter: str, tokens: list[int]) -> list[_Piece]:
        """Return the cached blocks at the beginning of ``tokens``; leaves at least one token to read."""
        keys = []
        for key, stop in _keys(adapter, tokens):
            if stop >= len(tokens) or key not in self._blocks:
                break
            keys.append(key)
        self._touch(keys)
        return [self._blocks[key] for key in keys]

    def count(self, tokens: int, hits: int) -> None:
        """Add a prompt of ``tokens`` tokens with ``hits`` cached tokens to the statistics."""
        self.queries += tokens
        self.hits += hits

    def keep(self, adapter: str, tokens: list[int], cache: PaddedCache, row: int) -> None:
        """Store copies of the full blocks of ``tokens``, the first tokens of ``row`` in ``cache``."""
        keys = []
        for key, stop in _keys(adapter, tokens):
            keys.append(key)
            if key not in self._blocks:
                piece = cache.piece(row, stop - BLOCK, stop)
                self._blocks[key] = piece
                self._bytes += _size(piece)
        self._touch(keys)
        while self._bytes > self._limit:
            self._drop()

    def shrink(self, tokens: int) -> None:
        """Drop the least recently used blocks until at most ``tokens`` tokens remain."""
        while self._blocks and self.tokens > tokens:
            self._drop()

    def _touch(self, keys: list[bytes]) -> None:
        # A block is useless without its predecessors, so the predecessors must be dropped later.
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _drop(self) -> None:
        _, piece = self._blocks.popitem(last=False)
        self._bytes -= _size(piece)


def _keys(adapter: str, tokens: list[int]) -> Iterator[tuple[bytes, int]]:
    key = adapter.encode()
    for stop in range(BLOCK, len(tokens) + 1, BLOCK):
        key = hashlib.blake2b(key + array("q", tokens[stop - BLOCK : stop]).tobytes(), digest_size=16).digest()
        yield key, stop


def _size(piece: _Piece) -> int:
    return sum(int(tensor.nbytes) for layer in piece for tensor in layer)
