"""The engine ``torch`` for causal language models that are read and do not generate: the logits after the last token.

Rows are padded at the end. A causal network computes each token from those before it, so padding at the end changes no
logit of a token, whatever positions, windows or states the network has.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.base.verification import distance, rounding
from conch.backends.tasks.engines import TorchEngine


class Prefix:
    """Tokens (INT64 ``ids``) with which several sequences begin; ``cache`` is the network's state after them."""

    __slots__ = ("cache", "ids")

    def __init__(self, ids: Array) -> None:
        self.ids = ids
        self.cache: Any = None


#: The head of causal language models.
CAUSAL_HEAD: Final = "AutoModelForCausalLM"


class CausalEngine(TorchEngine):
    """Computes ``logits`` ``[rows, kept tokens]`` after the last token of each row."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._kept: Any = slice(None)
        self._cache = next((name for name in ("cache", "past_key_values") if name in self.inputs), "")
        head = self._network.get_output_embeddings()
        if head is not None:
            # The head is a large part of the work; it is needed for one token of each row.
            head.register_forward_pre_hook(lambda _, given: (self._last(given[0]), *given[1:]))

    def keep(self, *ids: int | None) -> None:
        """Compute only the logits of these tokens from now on; None is ignored."""
        self._kept = [id for id in ids if id is not None]

    def run(
        self, arrays: Mapping[str, Array], names: Collection[str] = (), *, prefix: Prefix | None = None
    ) -> dict[str, Array]:
        """Read rows, which continue ``prefix`` if there is one. It must have been read before."""
        torch = self._torch
        self.use_threads()
        ids, mask = arrays["input_ids"], arrays["attention_mask"]
        settings: dict[str, Any] = {"use_cache": False}
        if prefix is not None:
            cache = copy.deepcopy(prefix.cache)
            cache.batch_repeat_interleave(len(ids))
            settings = {"use_cache": True, self._cache: cache}
            mask = np.concatenate([np.ones((len(mask), len(prefix.ids)), np.int64), mask], 1)
        self._thread.ends = self._tensor(arrays["attention_mask"].sum(1) - 1)
        with torch.inference_mode():
            network = self._network(input_ids=self._tensor(ids), attention_mask=self._tensor(mask), **settings)
            logits = self._last(network.logits)[:, 0, self._kept]
            return {"logits": logits.float().cpu().numpy()}

    def read(self, prefix: Prefix) -> None:
        """Compute the cache of a prefix."""
        self.use_threads()
        ids = self._tensor(prefix.ids[None])
        self._thread.ends = self._tensor(np.array([len(prefix.ids) - 1]))
        with self._torch.inference_mode():
            network = self._network(input_ids=ids, attention_mask=self._torch.ones_like(ids), use_cache=True)
            prefix.cache = network[self._cache]

    def continues_prefixes(self, ids: Sequence[int], count: int) -> bool:
        """Whether the logits after ``ids`` stay the same if the first ``count`` tokens are read before the others."""
        whole = np.array([list(ids), list(reversed(ids))])
        whole[:, :count] = whole[0, :count]
        rest, prefix = whole[:, count:], Prefix(whole[0, :count])
        expected = self.run({"input_ids": whole, "attention_mask": np.ones_like(whole)})
        try:
            self.read(prefix)
            continued = self.run({"input_ids": rest, "attention_mask": np.ones_like(rest)}, prefix=prefix)
        except Exception:  # networks without such a cache raise many types
            return False
        return distance(expected["logits"], continued["logits"]) <= rounding(self.precision)

    def _last(self, states: Any) -> Any:
        """Return the states of the last token of each row, ``[rows, 1, size]``, unless they have been chosen before."""
        if states.shape[1] == 1:
            return states
        ends = self._thread.ends
        return states[self._torch.arange(len(ends), device=states.device), ends][:, None]


def torch_class(head: str) -> type[TorchEngine]:
    """Return the class of the engine ``torch`` for a head."""
    return CausalEngine if head == CAUSAL_HEAD else TorchEngine
