"""The running batches of the engine ``transformers`` and their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from conch.backends.engines.transformers.beams import BeamSearch
from conch.backends.engines.transformers.network import DecoderNetwork
from conch.backends.engines.transformers.rows import OwnRows, PaddedRows, Rows
from conch.backends.engines.transformers.structure import Matcher
from conch.core.sampling.parameters import SamplingParams

Tensor = Any

#: The number of padding positions that is always allowed in a batch; above it, padding must not exceed the tokens.
_PADDING: Final = 4096


@dataclass(slots=True, eq=False)
class BatchRow:
    """An in-flight request: its parameters, its ``tokens`` including the prompt, and its batch (None while it waits).

    ``rank`` orders waiting rows, lowest first: priority, then arrival. ``max_length`` is the length limit including the
    prompt; ``end_ids`` are the tokens that end the row. ``generator`` is its random number generator, ``matcher`` the
    state of its grammar, and ``search`` the state of its beam search.
    """

    id: int
    rank: tuple[int, int]
    sampling: SamplingParams
    tokens: list[int]
    prompt_length: int
    end_ids: frozenset[int]
    max_length: int
    generator: Any = None
    matcher: Matcher | None = None
    search: BeamSearch | None = None
    batch: RunningBatch | None = None

    @property
    def width(self) -> int:
        """The number of rows that the request uses in a batch."""
        return self.sampling.beam_width

    @property
    def size(self) -> int:
        """The number of tokens that the request uses in the KV cache after its prompt has been read."""
        generated = self.search.length if self.search is not None else len(self.tokens) - self.prompt_length
        return self.width * (self.prompt_length + generated)


class RunningBatch:
    """Rows that step together with the same adapter.

    The beams of a request, and a row of a model whose state cannot be padded, get a batch of their own.
    """

    def __init__(self, network: DecoderNetwork, members: list[BatchRow], *, padded: bool) -> None:
        self.members = members
        self.adapter = members[0].sampling.lora_name
        self.padded = PaddedRows(network) if padded else None
        self._rows: Rows = self.padded or OwnRows(network)
        self._network = network
        for row in members:
            row.batch = self

    def read(self, tokens: list[list[int]], *, last: bool) -> Tensor:
        """Read a chunk of each prompt; returns the logits ``[rows, vocabulary]`` after it.

        ``last`` marks the last chunk, after which a prompt with beam search expands to one row per beam.
        """
        [first, *_] = self.members
        self._network.use(self.adapter)
        if first.search is None:
            return self._rows.feed(tokens)
        if self.padded is None:
            return self._rows.feed(tokens * first.width)
        logits = self._rows.feed(tokens)
        if last:
            self._rows.select([0] * first.width)
        return logits.expand(first.width, -1)

    def step(self) -> Tensor:
        """Read the last token of each row; returns the logits ``[rows, vocabulary]`` of the next tokens."""
        self._network.use(self.adapter)
        search = self.members[0].search
        if search is not None:
            return self._rows.feed([[beam.tokens[-1]] for beam in search.running])
        return self._rows.feed([[row.tokens[-1]] for row in self.members])

    def select(self, rows: list[int]) -> None:
        """Continue with these rows (beams); a row may occur several times."""
        if rows != list(range(len(rows))):
            self._rows.select(rows)

    def remove(self, row: BatchRow) -> None:
        """Remove a row; the last row moves to its position."""
        index = self.members.index(row)
        row.batch = None
        last = self.members.pop()
        if last is not row:
            self.members[index] = last
        if self.padded is not None and row.search is None:
            self.padded.cache.remove(index)

    def takes(self, other: RunningBatch) -> bool:
        """Whether ``other`` may be merged into this batch without too much padding."""
        if self is other or self.adapter != other.adapter or self.padded is None or other.padded is None:
            return False
        if self.members[0].search is not None or other.members[0].search is not None:
            return False
        mine, theirs = self.padded.cache, other.padded.cache
        tokens = sum(mine.lengths()) + sum(theirs.lengths())
        columns = max(mine.width, theirs.width) * (len(mine.starts) + len(theirs.starts))
        return columns - tokens <= max(_PADDING, tokens)

    def adopt(self, other: RunningBatch) -> None:
        """Move all rows of ``other`` into this batch; ``other`` must not be used afterwards."""
        assert self.padded is not None and other.padded is not None
        self.padded.cache.adopt(other.padded.cache)
        for row in other.members:
            row.batch = self
        self.members += other.members


class Reading:
    """Reads the prompts of a new batch in chunks; the first ``known`` tokens are already in the cache."""

    def __init__(self, batch: RunningBatch, known: int = 0) -> None:
        self.batch = batch
        self._left = [row.tokens[known:] for row in batch.members]

    @property
    def columns(self) -> int:
        return max(map(len, self._left))

    def advance(self, columns: int) -> Tensor | None:
        """Read at most ``columns`` columns; returns the logits after the last chunk, else None.

        Several prompts, and a prompt whose state cannot be padded, are read in a single chunk.
        """
        whole = len(self._left) > 1 or self.batch.padded is None or self.columns <= columns
        chunks = self._left if whole else [tokens[:columns] for tokens in self._left]
        self._left = [tokens[len(chunk) :] for tokens, chunk in zip(self._left, chunks, strict=True)]
        logits = self.batch.read(chunks, last=whole)
        return logits if whole else None
