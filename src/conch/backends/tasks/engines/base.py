"""What every engine that runs a network has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

from conch.backends.base.arrays import Array
from conch.errors import unsupported


class NetworkEngine(ABC):
    """A loaded network.  ``run`` may be called by several threads at once, one for each instance.

    ``inputs`` are the names that it takes, among them ``input_ids``, ``attention_mask``, ``token_type_ids``,
    ``pixel_values`` …; ``outputs`` the names of what it computes, as transformers calls them: ``logits``,
    ``last_hidden_state``, ``start_logits``, ``end_logits`` ….  ``precision`` is ``fp32``, ``fp16``,
    ``bf16`` or ``int8``; ``device`` is ``cpu`` or ``cuda``; ``variant`` is the name in ``conch.json`` of what was
    converted.
    """

    name: str
    device: str = "cpu"
    precision: str
    variant: str = ""
    #: What its opening says against it, in a sentence.
    warning: str = ""
    inputs: frozenset[str]
    outputs: tuple[str, ...]

    @property
    def parts(self) -> Sequence[NetworkEngine]:
        """The engines that run: itself, or those that it chooses from."""
        return (self,)

    def padded_shape(self, rows: int, length: int) -> tuple[int, int]:
        """The shape that ``[rows, length]`` should be padded to: a larger one where new shapes slow the engine down."""
        return rows, length

    def require_outputs(self, names: Collection[str], source: str) -> None:
        """Raise UNSUPPORTED unless it gives all of ``names``, which the task of checkpoint ``source`` reads."""
        if not set(names) <= set(self.outputs):
            raise unsupported(
                f"'{source}' gives {', '.join(self.outputs)}; the task needs {' and '.join(names)}: export it with the "
                "head of the task, or set parameter 'task' to what it was exported for"
            )

    def require_tensors(self, arrays: Mapping[str, Array]) -> None:
        """Raise INVALID_ARG if what it answers to ``arrays`` depends on weights that the checkpoint does not have.

        A graph has all of its own, so that there is nothing to do.
        """
        return None

    def reference(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """What transformers itself answers where it is given ``arrays``, all that a tokenizer or processor makes.

        Empty for engines that do not run transformers' networks.
        """
        return {}

    @abstractmethod
    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Compute FP32 outputs from INT64 arrays of ``[sequences, length]``, or FP32 pixels.

        ``arrays`` may have more than ``inputs``, which are ignored.
        """
