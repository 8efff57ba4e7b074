"""The rows of a batch with their state: padded rows over conch's KV cache, or rows whose state transformers keeps.

All rows of an object step together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from conch.backends.engines.transformers.cache import PaddedCache
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
#: Arguments that ``generate`` passes to a decoding loop besides the network's own.
_OF_THE_LOOP: Final = ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer")


class Rows(ABC):
    """The rows of a batch; they have the same length unless an implementation pads them."""

    @abstractmethod
    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Read the next tokens, the same number for each row; returns the logits ``[rows, vocabulary]`` after them."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows in this order; a row may occur several times."""


class PaddedRows(Rows):
    """Rows over a :class:`PaddedCache`; their prompts may have different lengths."""

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
    """Rows of the same length, run as in ``generate``, for any architecture.

    ``generate`` itself prepares the state: the type of cache, and the inputs that are specific to a network.
    """

    def __init__(self, network: DecoderNetwork) -> None:
        self._network = network
        self._ids: Tensor = None
        self._carried: dict[str, Any] = {}

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        model = self._network.model
        new = torch.tensor([list(row) for row in tokens], device=self._network.device)
        first = self._ids is None
        if first:
            model.generate(new, attention_mask=torch.ones_like(new), custom_generate=self._begin, **_ARGUMENTS)
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
