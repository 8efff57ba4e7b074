"""Pools the logits of a masked language model over a text, while the network computes them.

A logit for each word at each position is the largest tensor of a SPLADE model by far: 500 MB for 4096 tokens. The
last linear layer is therefore replaced by one that computes a part of the positions at a time and keeps their maximum
or sum.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

#: The maximum number of logits that are computed at a time, unless one position of all texts has more.
PART: Final = 1 << 23
#: The largest difference from the logits of the network itself, relative to the greatest.
_SAME: Final = 1e-4


class VocabularyPooling:
    """Runs ``network`` and pools its logits by ``strategy`` (``max``, ``sum``) of log(1 + max(0, x)).

    ``twice`` takes the logarithm again. Networks whose last layer is not linear compute all logits first.
    """

    def __init__(self, network: Any, strategy: str, twice: bool) -> None:
        import torch

        self._torch = torch
        self._network = network
        self._strategy, self._twice = strategy, twice
        self._thread = threading.local()
        last = network.get_output_embeddings()
        self._projection: Any = last if isinstance(last, torch.nn.Linear) else None
        if self._projection is not None:
            self._linear = self._projection.forward
            self._projection.forward = self._pooled_part
            if not self._agrees():
                self._projection.forward = self._linear
                self._projection = None

    def __call__(self, tensors: Mapping[str, Any]) -> Any:
        """Return ``[n, vocabulary]`` for the network's inputs."""
        mask = tensors["attention_mask"]
        if self._projection is None:
            return self._reduced(self._network(**tensors).logits, mask)
        self._thread.mask = mask
        try:
            return self._network(**tensors).logits[:, 0]
        finally:
            self._thread.mask = None

    def _pooled_part(self, hidden: Any) -> Any:
        """Return the pooled logits ``[n, 1, vocabulary]`` of ``[n, length, size]``; outside of a call, all logits."""
        mask = getattr(self._thread, "mask", None)
        if mask is None:
            return self._linear(hidden)
        rows, length = mask.shape
        step = max(1, PART // (rows * self._projection.out_features))
        pooled: Any = None
        for start in range(0, length, step):
            end = start + step
            part = self._reduced(self._linear(hidden[:, start:end]), mask[:, start:end])
            if pooled is None:
                pooled = part
            else:
                pooled = self._torch.maximum(pooled, part) if self._strategy == "max" else pooled + part
        return pooled[:, None]

    def _reduced(self, logits: Any, mask: Any) -> Any:
        values = (logits * mask[:, :, None].to(logits.dtype)).relu_().log1p_()
        if self._twice:
            values = values.log1p_()
        return values.amax(1) if self._strategy == "max" else values.sum(1)

    def _agrees(self) -> bool:
        """Whether pooling in the last layer equals pooling the logits, for an example."""
        torch = self._torch
        ids = torch.arange(12, device=self._network.device).reshape(2, 6) % self._network.config.vocab_size
        tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        tensors["attention_mask"][1, 4:] = 0
        with torch.inference_mode():
            expected = self._reduced(self._network(**tensors).logits, tensors["attention_mask"])
            try:
                pooled = self(tensors)
            except Exception:  # networks that need all positions after the last layer raise many types
                return False
        close = (pooled - expected).abs().max() <= _SAME * expected.abs().max().clamp(min=1e-6)
        return pooled.shape == expected.shape and bool(close)
