"""The base class of the engines that run a task's network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

from conch.backends.base.arrays import Array
from conch.core.errors import unsupported


class NetworkEngine(ABC):
    """A loaded network. Several threads, one per instance, may call ``run`` concurrently.

    ``inputs`` are its input names (``input_ids``, ``attention_mask``, ``token_type_ids``, ``pixel_values`` …) and
    ``outputs`` its output names (``logits``, ``last_hidden_state``, ``start_logits``, ``end_logits`` …), as in
    transformers. ``precision`` is ``fp32``, ``fp16``, ``bf16`` or ``int8``; ``device`` is ``cpu`` or ``cuda``;
    ``variant`` is the name of a converted variant in ``conch.json``.
    """

    name: str
    device: str = "cpu"
    precision: str
    variant: str = ""
    #: A problem found when the engine was opened, as a sentence; empty if there is none.
    warning: str = ""
    inputs: frozenset[str]
    outputs: tuple[str, ...]

    @property
    def parts(self) -> Sequence[NetworkEngine]:
        """The underlying engines: the engine itself, or the engines that it selects from."""
        return (self,)

    def padded_shape(self, rows: int, length: int) -> tuple[int, int]:
        """Return the shape to which ``[rows, length]`` is padded; larger if new shapes slow the engine down."""
        return rows, length

    def require_outputs(self, names: Collection[str], source: str) -> None:
        """Raise UNSUPPORTED unless the network has all outputs ``names``; ``source`` is the checkpoint."""
        if not set(names) <= set(self.outputs):
            raise unsupported(
                f"'{source}' gives {', '.join(self.outputs)}; the task needs {' and '.join(names)}: export it with the "
                "head of the task, or set parameter 'task' to what it was exported for"
            )

    def require_tensors(self, arrays: Mapping[str, Array]) -> None:
        """Raise INVALID_ARG if the outputs for ``arrays`` depend on weights that the checkpoint lacks.

        Does nothing by default, because an exported graph contains all of its weights.
        """
        return None

    def reference(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return transformers' outputs for ``arrays``, the complete output of a tokenizer or processor.

        Empty for engines that do not run transformers' networks.
        """
        return {}

    @abstractmethod
    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Compute FP32 outputs from INT64 arrays of ``[sequences, length]``, or FP32 pixels.

        Arrays that are not in ``inputs`` are ignored.
        """
