"""Models that keep state where no cache of ours is: what they allow is found out by trying."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import LlamaConfig

from conch.backends.engines.transformers.network import DecoderNetwork
from conch.backends.engines.transformers.probe import BatchSupport, probe_batch_support


class _Copyable:
    """A state that goes from step to step with its row."""

    def __init__(self, total: Any) -> None:
        self.total = total

    def reorder_cache(self, rows: Any) -> None:
        self.total = self.total[rows]


class _Given(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Model:
    """Adds up token ids. ``inside``: the sum is kept in the model itself; else, if ``copyable``, by an object."""

    dtype = torch.float32
    config = LlamaConfig(vocab_size=50)

    def __init__(self, *, inside: bool, copyable: bool) -> None:
        self._inside, self._copyable = inside, copyable
        self._total: Any = None

    def forward(self, input_ids: Any, state: Any = None, **_: Any) -> Any:
        new = input_ids.sum(dim=1).float()
        if state is not None:
            new = new + (self._total if self._inside else state.total if self._copyable else state["total"])
        self._total = new
        kept: Any = _Copyable(new) if self._copyable else {"total": new}
        return _Given(logits=new[:, None, None].expand(-1, 1, 50), state=kept)

    __call__ = forward

    def generate(self, ids: Any, *, custom_generate: Any, **_: Any) -> Any:
        return custom_generate(self, ids, use_cache=True)

    def prepare_inputs_for_generation(self, ids: Any, next_sequence_length: Any, state: Any = None, **_: Any) -> Any:
        return {"input_ids": ids if state is None else ids[:, -next_sequence_length:], "state": state}

    def _update_model_kwargs_for_generation(self, given: Any, carried: dict[str, Any]) -> dict[str, Any]:
        return {**carried, "state": given.state}


@pytest.mark.parametrize(
    ("inside", "copyable", "found"),
    [
        (False, True, BatchSupport(padding=False, several_rows=True, beam_search=True)),
        (False, False, BatchSupport(padding=False, several_rows=True, beam_search=False)),
        (True, True, BatchSupport(padding=False, several_rows=False, beam_search=False)),
    ],
)
def test_what_a_state_allows_is_found_by_trying(inside: bool, copyable: bool, found: BatchSupport) -> None:
    network = DecoderNetwork(Model(inside=inside, copyable=copyable), torch.device("cpu"))
    assert probe_batch_support(network, 100) == found
