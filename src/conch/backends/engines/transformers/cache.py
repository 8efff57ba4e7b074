"""The KV cache of the engine ``transformers``: rows of different lengths that end in the same column.

Rows are padded on the left. A step therefore writes one column for all rows, and distances between tokens are the same
as without padding, so rotary, learned and ALiBi positions and sliding windows are correct. Buffers have spare rows and
columns, so that a step does not copy existing content. ``Prefixes`` stores the keys and values of earlier prompts in
blocks, for prompts with the same prefix.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

Tensor = Any

#: The minimum number of columns added when a buffer is full.
_ROOM: Final = 128


class PaddedLayer(CacheLayerMixin):
    """Keys and values of a layer, ``[rows, heads, columns, size]``; the cache ``columns`` defines the used part."""

    is_sliding = False
    is_croppable = False

    def __init__(self, columns: PaddedCache) -> None:
        super().__init__()
        self.columns = columns
        self.buffers: list[Tensor] = []
        self.pending = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.buffers = [
            torch.zeros(0, states.shape[1], 0, states.shape[3]).to(states) for states in (key_states, value_states)
        ]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, start, end = key_states.shape[0], self.columns.start, self.columns.end
        self.pending = key_states.shape[2]
        self.reserve(rows, end + self.pending)
        views = []
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:rows, :, end : end + self.pending] = new
            views.append(buffer[:rows, :, start : end + self.pending])
        self.keys, self.values = views
        return self.keys, self.values

    def reserve(self, rows: int, columns: int) -> None:
        """Grow the buffers to at least this many rows and columns; the content keeps its position."""
        for index, buffer in enumerate(self.buffers):
            height, heads, width, size = buffer.shape
            if rows <= height and columns <= width:
                continue
            # The first allocation has the exact size, without spare columns for a prompt that is read at once.
            wider = columns + max(width // 4, _ROOM) if width else columns
            grown = buffer.new_zeros(
                height if rows <= height else max(rows, height + height // 2), heads, max(width, wider), size
            )
            grown[:height, :, :width] = buffer
            self.buffers[index] = grown

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns.end - self.columns.start + self.pending

    def get_max_length(self) -> int:
        return -1


class PaddedCache(Cache):
    """The cache of a batch. ``starts`` has the first column of each row; all rows end before column ``end``."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=partial(PaddedLayer, self))
        self.starts: list[int] = []
        #: The offset of the positions of each row, because images may have other positions than tokens.
        self.offsets: list[int] = []
        self.end = 0

    @property
    def start(self) -> int:
        """The first used column."""
        return min(self.starts, default=self.end)

    @property
    def width(self) -> int:
        return self.end - self.start

    def lengths(self) -> list[int]:
        """Return the number of tokens of each row."""
        return [self.end - start for start in self.starts]

    def mask(self, new: int, device: Any) -> tuple[Tensor, Tensor]:
        """Return the attention mask (1: token) and the positions of the new tokens for a step of ``new`` columns."""
        columns = torch.arange(self.start, self.end + new, device=device)
        starts = torch.tensor(self.starts, device=device)[:, None]
        offsets = torch.tensor(self.offsets, device=device)[:, None]
        return (columns >= starts).long(), (columns[-new:] - starts).clamp(min=0) + offsets

    def advance(self, new: int) -> None:
        """Add ``new`` columns that the network has written to the used part."""
        self.end += new
        for layer in self.layers:
            layer.pending = 0
            layer.keys = layer.values = None

    def remove(self, row: int) -> None:
        """Remove a row; the last row moves to its position."""
        last = len(self.starts) - 1
        if row != last:
            for buffer in self._buffers():
                columns = slice(self.starts[last], self.end)
                buffer[row, :, columns] = buffer[last, :, columns]
            self.starts[row] = self.starts[last]
            self.offsets[row] = self.offsets[last]
        self.starts.pop()
        self.offsets.pop()
        self._compact()

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows in this order; a row may occur several times."""
        columns = slice(self.start, self.end)
        for layer in self.layers:
            for index, buffer in enumerate(layer.buffers):
                chosen = buffer[list(rows), :, columns]
                layer.reserve(len(rows), self.end)
                layer.buffers[index][: len(rows), :, columns] = chosen
        self.starts = [self.starts[row] for row in rows]
        self.offsets = [self.offsets[row] for row in rows]

    def adopt(self, other: PaddedCache) -> None:
        """Append the rows of another cache, which must not be used afterwards."""
        columns = other.width
        if columns > self.end:
            self._shift(columns - self.end)
        first, count = len(self.starts), len(other.starts)
        while len(self.layers) < len(other.layers):
            self.layers.append(PaddedLayer(self))
        for mine, theirs in zip(self.layers, other.layers, strict=False):
            if not theirs.buffers:
                continue
            if not mine.buffers:
                mine.lazy_initialization(*theirs.buffers)
            mine.reserve(first + count, self.end)
            for buffer, new in zip(mine.buffers, theirs.buffers, strict=True):
                buffer[first : first + count, :, self.end - columns : self.end] = new[
                    :count, :, other.end - columns : other.end
                ]
        self.starts += [self.end - length for length in other.lengths()]
        self.offsets += other.offsets

    def piece(self, row: int, start: int, stop: int) -> list[list[Tensor]]:
        """Copy the keys and values of tokens ``start`` to ``stop`` of a row, ``[1, heads, tokens, size]``."""
        first = self.starts[row]
        return [
            [buffer[row : row + 1, :, first + start : first + stop].clone() for buffer in layer.buffers]
            for layer in self.layers
        ]

    def restore(self, pieces: Sequence[list[list[Tensor]]], tokens: int) -> None:
        """Fill an empty cache with a row of ``tokens`` tokens from consecutive pieces."""
        self.layers = [PaddedLayer(self) for _ in pieces[0]]
        for index, layer in enumerate(self.layers):
            if pieces[0][index]:
                layer.lazy_initialization(*pieces[0][index])
                layer.buffers = [
                    torch.cat([piece[index][which] for piece in pieces], dim=2) for which in range(len(layer.buffers))
                ]
        self.starts, self.offsets, self.end = [0], [0], tokens

    def _buffers(self) -> list[Tensor]:
        return [buffer for layer in self.layers for buffer in layer.buffers]

    def _shift(self, columns: int) -> None:
        """Move the content to the right; a negative number moves it to the left."""
        source = slice(self.start, self.end)
        target = slice(self.start + columns, self.end + columns)
        rows = len(self.starts)
        for layer in self.layers:
            layer.reserve(rows, self.end + columns)
            for buffer in layer.buffers:
                buffer[:rows, :, target] = buffer[:rows, :, source].clone()
        self.starts = [start + columns for start in self.starts]
        self.end += columns

    def _compact(self) -> None:
        """Free unused columns on the left if there are many."""
        if not self.starts:
            self.end = 0
        elif self.start > self.width + _ROOM:
            self._shift(-self.start)
            for layer in self.layers:
                layer.buffers = [buffer[:, :, : self.end + _ROOM].clone() for buffer in layer.buffers]


#: Tokens per block.
BLOCK: Final = 32

_Piece = list[list[Any]]


class Prefixes:
    """The most recently used blocks, up to ``limit`` bytes; the key of a block covers all tokens up to its end.

    Only requests with the same ``prefix_key`` share blocks.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: OrderedDict[bytes, _Piece] = OrderedDict()
        self._bytes = 0
        self.queries = self.hits = 0

    @property
    def tokens(self) -> int:
        return BLOCK * len(self._blocks)

    def find(self, prefix_key: str, tokens: list[int]) -> list[_Piece]:
        """Return the cached blocks at the beginning of ``tokens``; leaves at least one token to read."""
        keys = []
        for key, stop in _keys(prefix_key, tokens):
            if stop >= len(tokens) or key not in self._blocks:
                break
            keys.append(key)
        self._touch(keys)
        return [self._blocks[key] for key in keys]

    def count(self, tokens: int, hits: int) -> None:
        """Add a prompt of ``tokens`` tokens with ``hits`` cached tokens to the statistics."""
        self.queries += tokens
        self.hits += hits

    def keep(self, prefix_key: str, tokens: list[int], cache: PaddedCache, row: int) -> None:
        """Store copies of the full blocks of ``tokens``, the first tokens of ``row`` in ``cache``."""
        keys = []
        for key, stop in _keys(prefix_key, tokens):
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


def _keys(prefix_key: str, tokens: list[int]) -> Iterator[tuple[bytes, int]]:
    key = prefix_key.encode("utf-8", "surrogatepass")
    for stop in range(BLOCK, len(tokens) + 1, BLOCK):
        key = hashlib.blake2b(key + array("q", tokens[stop - BLOCK : stop]).tobytes(), digest_size=16).digest()
        yield key, stop


def _size(piece: _Piece) -> int:
    return sum(int(tensor.nbytes) for layer in piece for tensor in layer)
