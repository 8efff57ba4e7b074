"""What runs a network: arrays in, arrays out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from conch.backends.native.arrays import Array


class NetworkEngine(ABC):
    """A loaded network.  ``run`` may be called by several threads at once, one for each instance.

    ``inputs`` are the names that it takes of ``input_ids``, ``attention_mask``, ``token_type_ids``,
    ``pixel_values`` …; ``outputs`` those that it gives, as transformers calls them: ``logits``,
    ``last_hidden_state``, ``start_logits``, ``end_logits`` ….  ``precision`` is ``fp32``, ``fp16``,
    ``bf16`` or ``int8``; ``device`` is ``cpu`` or ``cuda``.
    """

    name: str
    device: str = "cpu"
    precision: str
    inputs: frozenset[str]
    outputs: tuple[str, ...]

    def shape(self, rows: int, length: int) -> tuple[int, int]:
        """What ``[rows, length]`` should be padded to: more where an engine is slow with shapes that are new to it."""
        return rows, length

    @abstractmethod
    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """INT64 ``[sequences, length]`` (or FP32 pixels) in, FP32 arrays out; the caller leaves out nothing of
        ``inputs`` and may give more, which is ignored."""
