"""The running batches of the engine ``transformers``, and the state of their rows.

Rows are padded over conch's KV cache, or transformers keeps their state. All rows of a batch step together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from conch.backends.batching.sampler import SequenceState
from conch.backends.engines.transformers.cache import PaddedCache
from conch.backends.engines.transformers.media import PromptMedia
from conch.backends.engines.transformers.network import DecoderNetwork
from conch.core.errors import unsupported

Tensor = Any

#: The names of the state that models of transformers pass from step to step.
_STATES: Final = ("cache", "past_key_values", "cache_params", "state")
#: Arguments of ``generate`` that select one greedy sequence; they override the checkpoint's generation_config.json.
_ARGUMENTS: Final[Mapping[str, Any]] = {
    "do_sample": False, "num_beams": 1, "num_return_sequences": 1, "max_new_tokens": 1,
    "cache_implementation": "dynamic",
}  # fmt: skip
#: Arguments that ``generate`` passes to a decoding loop in addition to the network's.
_OF_THE_LOOP: Final = ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer")


class Rows(ABC):
    """The rows of a batch; they have the same length unless an implementation pads them."""

    @abstractmethod
    def feed(self, tokens: Sequence[Sequence[int]], media: PromptMedia | None = None) -> Tensor:
        """Read the next tokens, the same number for each row; returns the logits ``[rows, vocabulary]`` after them.

        ``media`` are the items of a prompt; all rows then have that prompt.
        """

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows in this order; a row may occur several times."""


class PaddedRows(Rows):
    """Rows over a :class:`PaddedCache`; their prompts may have different lengths."""

    def __init__(self, network: DecoderNetwork) -> None:
        self._network = network
        self.cache = PaddedCache()

    def feed(self, tokens: Sequence[Sequence[int]], media: PromptMedia | None = None) -> Tensor:
        longest = max(map(len, tokens))
        if not self.cache.starts:
            self.cache.starts = [longest - len(row) for row in tokens]
            self.cache.offsets = [0] * len(tokens)
        if media is not None:
            self.cache.offsets = [media.offset] * len(tokens)
        ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in tokens], device=self._network.device)
        return self._network.run(ids, self.cache, media)

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)


class OwnRows(Rows):
    """Rows of the same length, run as in ``generate``, for any architecture.

    ``generate`` itself prepares the state: the type of cache, and the inputs that are specific to a network.
    """

    def __init__(self, network: DecoderNetwork) -> None:
        self._network = network
        self._ids: Tensor = None
        self._carried: dict[str, Any] = {}

    def feed(self, tokens: Sequence[Sequence[int]], media: PromptMedia | None = None) -> Tensor:
        model = self._network.model
        new = torch.tensor([list(row) for row in tokens], device=self._network.device)
        first = self._ids is None
        if first:
            model.generate(new, attention_mask=torch.ones_like(new), custom_generate=self._begin, **_ARGUMENTS)
            if media is not None:
                assert self._network.media is not None
                self._carried |= self._network.media.begin(media, 0, new.shape[1])
        else:
            self._ids = torch.cat([self._ids, new], dim=1)
        continued = not first and self._carried["use_cache"]
        inputs = model.prepare_inputs_for_generation(
            self._ids,
            next_sequence_length=new.shape[1] if continued else None,
            is_first_iteration=first,
            **self._carried,
        )
        output = model(**inputs, return_dict=True)
        self._carried = model._update_model_kwargs_for_generation(output, self._carried)
        return output.logits[:, -1].float()

    def select(self, rows: Sequence[int]) -> None:
        chosen = torch.tensor(list(rows), device=self._network.device)
        count = len(self._ids)
        self._ids = self._ids[chosen]
        for name, state in self._carried.items():
            if name in _STATES and state is not None:
                if not hasattr(state, "reorder_cache"):
                    raise unsupported("beam search is not supported by the state of this model")
                state.reorder_cache(chosen)
            elif isinstance(state, torch.Tensor) and state.dim() > 1 and len(state) == count:
                self._carried[name] = state[chosen]

    def _begin(self, model: Any, ids: Tensor, **carried: Any) -> Tensor:
        """Store the state that ``generate`` has prepared; called by ``generate`` in place of its decoding loop."""
        for name in _OF_THE_LOOP:
            carried.pop(name, None)
        self._ids, self._carried = ids, carried
        return ids


#: The number of padding positions that is always allowed in a batch; above it, padding must not exceed the tokens.
_PADDING: Final = 4096


@dataclass(slots=True, eq=False)
class BatchRow(SequenceState):
    """An in-flight request with its batch (None while it waits)."""

    batch: RunningBatch | None = None
    media: PromptMedia | None = None

    @property
    def keyed_tokens(self) -> list[int]:
        """The tokens, with numbers in the place of placeholders that differ with the content of their items."""
        return self.tokens if self.media is None else self.media.keyed(self.tokens)

    @property
    def size(self) -> int:
        """The number of tokens that the request uses in the KV cache after its prompt has been read."""
        generated = self.search.length if self.search is not None else len(self.tokens) - self.prompt_length
        return self.width * (self.prompt_length + generated)


class RunningBatch:
    """Rows that step together with the same adapter.

    The beams of a request, and a row of a model whose state cannot be padded, get a separate batch.
    """

    def __init__(self, network: DecoderNetwork, rows: list[BatchRow], *, padded: bool) -> None:
        self.members = rows
        self.adapter = rows[0].sampling.lora_name
        self.padded = PaddedRows(network) if padded else None
        self._rows: Rows = self.padded or OwnRows(network)
        self._network = network
        for row in rows:
            row.batch = self

    def read(self, tokens: list[list[int]], *, last: bool) -> Tensor:
        """Read a chunk of each prompt; returns the logits ``[rows, vocabulary]`` after it.

        ``last`` marks the last chunk, after which a prompt with beam search expands to one row per beam.
        """
        [first, *_] = self.members
        self._network.use(self.adapter)
        if first.search is None:
            return self._rows.feed(tokens, first.media)
        if self.padded is None:
            return self._rows.feed(tokens * first.width, first.media)
        logits = self._rows.feed(tokens, first.media)
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

        Several prompts, and a prompt whose state cannot be padded, are read in a single chunk, and so is a prompt whose
        tokens see later ones.
        """
        first = self.batch.members[0]
        if first.media is not None and first.media.whole and len(self._left[0]) == len(first.tokens):
            columns = len(first.media.prompt)
        whole = len(self._left) > 1 or self.batch.padded is None or self.columns <= columns
        chunks = self._left if whole else [tokens[:columns] for tokens in self._left]
        self._left = [tokens[len(chunk) :] for tokens, chunk in zip(self._left, chunks, strict=True)]
        logits = self.batch.read(chunks, last=whole)
        return logits if whole else None
