"""The rows of a batch with their state: padded rows over a KV cache of ours, or rows whose state transformers keeps.

All rows of an object take every step together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import torch

from conch.backends.engines.transformers.cache import PaddedCache
from conch.backends.engines.transformers.network import DecoderNetwork
from conch.errors import unsupported

Tensor = Any

#: The names under which models of transformers carry their state from step to step.
_STATES: Final = ("past_key_values", "cache_params", "state")


class Rows(ABC):
    """Rows of one length, or of several where an implementation pads them."""

    @abstractmethod
    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Read the next tokens, equally many for each row; returns the logits ``[rows, vocabulary]`` after them."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows in this order; a row may be there several times."""


class PaddedRows(Rows):
    """Rows over a :class:`PaddedCache`, whose prompts may have different lengths."""

    def __init__(self, network: DecoderNetwork) -> None:
        self._network = network
        self.cache = PaddedCache()

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, tokens))
        if not self.cache.starts:
            self.cache.starts = [longest - len(row) for row in tokens]
        ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in tokens], device=self._network.device)
        return self._network.run(ids, self.cache)

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)


class OwnRows(Rows):
    """Rows of one length, run as ``generate`` runs them, with the state of any architecture."""

    def __init__(self, network: DecoderNetwork) -> None:
        self._network = network
        self._ids: Tensor = None
        self._carried: dict[str, Any] = {"use_cache": True, **network.last}

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        model = self._network.model
        new = torch.tensor([list(row) for row in tokens], device=self._network.device)
        first = self._ids is None
        self._ids = new if first else torch.cat([self._ids, new], dim=1)
        if first:
            self._carried["attention_mask"] = torch.ones_like(new)
        keeps = any(self._carried.get(name) is not None for name in _STATES)
        inputs = model.prepare_inputs_for_generation(
            self._ids, next_sequence_length=new.shape[1] if keeps else None, is_first_iteration=first, **self._carried
        )
        given = model(**inputs, return_dict=True)
        self._carried = model._update_model_kwargs_for_generation(given, self._carried)
        return given.logits[:, -1].float()

    def select(self, rows: Sequence[int]) -> None:
        chosen = torch.tensor(list(rows), device=self._network.device)
        self._ids = self._ids[chosen]
        self._carried["attention_mask"] = self._carried["attention_mask"][chosen]
        for name in _STATES:
            state = self._carried.get(name)
            if state is not None:
                if not hasattr(state, "reorder_cache"):
                    raise unsupported("beam search is not supported by the state of this model")
                state.reorder_cache(chosen)
