"""Two engines of one network, of which each run takes the one that was measured to be faster for its shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from conch.backends.native.arrays import Array
from conch.backends.tasks.engines.base import NetworkEngine
from conch.errors import invalid

#: Shapes whose engine is remembered; it is found again for others, in some microseconds.
_REMEMBERED: Final = 4096


class EnginesByShape(NetworkEngine):
    """``usual``, and ``other`` for the shapes of which ``other_at`` (rows, tokens) is true.

    Which one runs depends on the shape alone, so that the same batch always gets the same answer.  It passes for
    ``usual`` in name, precision and device.  Raises INVALID_ARG where the two do not give the same outputs.
    """

    def __init__(self, usual: NetworkEngine, other: NetworkEngine, other_at: Callable[[int, int], bool]) -> None:
        if set(usual.outputs) != set(other.outputs):
            raise invalid(
                f"variants '{usual.variant}' and '{other.variant}' of one model give {', '.join(usual.outputs)} and "
                f"{', '.join(other.outputs)}: convert it again, or set parameter 'by_shape' to false"
            )
        self.name, self.device, self.precision, self.variant = usual.name, usual.device, usual.precision, usual.variant
        self.inputs, self.outputs = usual.inputs | other.inputs, usual.outputs
        self._usual, self._other = usual, other
        self._at = lru_cache(_REMEMBERED)(lambda rows, tokens: other if other_at(rows, tokens) else usual)

    @property
    def parts(self) -> Sequence[NetworkEngine]:
        return (self._usual, self._other)

    def padded_shape(self, rows: int, length: int) -> tuple[int, int]:
        return self._at(rows, length).padded_shape(rows, length)

    def require_tensors(self, arrays: Mapping[str, Array]) -> None:
        for engine in self.parts:
            engine.require_tensors(arrays)

    def reference(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return self._usual.reference(arrays)

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        rows, tokens = arrays["input_ids"].shape
        return self._at(rows, tokens).run(arrays)
