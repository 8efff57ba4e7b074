"""Shared memory as messages name it: tensors in regions that clients have registered.

The decoders of both protocols resolve names through ``Regions``, which the server has; a codec process, which has none,
notes the places instead.  Pure.  Source: Triton's shared memory extension.
"""

from __future__ import annotations

from typing import Any, Final

from conch.errors import ConchError, not_found
from conch.inference import SharedTensors

#: What names the region of a tensor, among the parameters of the tensor.
REGION: Final = "shared_memory_region"
OFFSET: Final = "shared_memory_offset"
SIZE: Final = "shared_memory_byte_size"


class Regions(SharedTensors):
    """What one request has in the regions that clients have registered, by name; this one has none.

    ``offset`` and ``size`` are bytes.  Both methods raise NOT_FOUND for an unknown name, INVALID_ARG for what is not
    within the region.
    """

    __slots__ = ()

    def read(self, datatype: str, name: str, offset: int, size: int) -> Any:
        """The data of an input: a ``Buffer``, or ``StoredData``."""
        raise unknown_region(name)

    def place(self, output: str, name: str, offset: int, size: int) -> None:
        """Note where an output goes."""
        raise unknown_region(name)


#: For servers where no region is registered.
NO_REGIONS: Final = Regions()


def unknown_region(name: str) -> ConchError:
    return not_found(f"Unable to find shared memory region: '{name}'")
