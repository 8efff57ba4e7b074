"""Runs a causal language model of transformers: from token ids and a cache to the next logits."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from conch.backends.engines.transformers.cache import PaddedCache

Tensor = Any


def cache_argument(model: Any) -> str:
    """Return the name of the argument of ``forward`` for a KV cache: ``cache`` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class DecoderNetwork:
    """A model on its device with its LoRA adapters; not thread-safe."""

    def __init__(self, model: Any, device: Any, adapters: Iterable[str] = ()) -> None:
        self.model = model
        self.device = device
        self.adapters = tuple(adapters)
        self._adapter: str | None = None
        taken = inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model)
        self.cached = self._cache_argument in taken and "attention_mask" in taken
        self._positions = "position_ids" in taken
        #: Arguments that request only the logits of the last position.
        self.last = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}

    def use(self, adapter: str) -> None:
        """Switch to a LoRA adapter; ``""`` selects none."""
        if adapter == self._adapter or not self.adapters:
            return
        if adapter:
            self.model.enable_adapters()
            self.model.set_adapter(adapter)
        else:
            self.model.disable_adapters()
        self._adapter = adapter

    def run(self, ids: Tensor, cache: PaddedCache) -> Tensor:
        """Read ``ids`` ``[rows, new]`` into a cache; returns the last FP32 logits, ``[rows, vocabulary]``."""
        new = ids.shape[1]
        mask, positions = cache.mask(new, self.device)
        arguments: dict[str, Any] = {self._cache_argument: cache}
        if self._positions:
            arguments["position_ids"] = positions
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            use_cache=True,
            return_dict=True,
            **arguments,
            **self.last,
        )
        cache.advance(new)
        return output.logits[:, -1].float()
