"""Shared memory references in messages: tensors in regions that clients have registered.

The decoders of both protocols resolve names through the server's ``Regions``; an offloading process has no
regions, and records the references instead. Does no I/O. Source: Triton's shared memory extension.
"""

from __future__ import annotations

from typing import Any, Final

from conch.core.errors import ConchError, not_found
from conch.core.inference import SharedTensors

#: The tensor parameter with the name of its region.
REGION: Final = "shared_memory_region"
OFFSET: Final = "shared_memory_offset"
SIZE: Final = "shared_memory_byte_size"


class Regions(SharedTensors):
    """The registered shared memory of one request, by region name; this base class has none.

    ``offset`` and ``size`` are in bytes. Both methods raise NOT_FOUND for an unknown name, INVALID_ARG for a part
    outside the region.
    """

    __slots__ = ()

    def read(self, datatype: str, name: str, offset: int, size: int) -> Any:
        """Return the data of an input: a ``Buffer`` or ``StoredData``."""
        raise unknown_region(name)

    def set_target(self, output: str, name: str, offset: int, size: int) -> None:
        """Set the target of an output."""
        raise unknown_region(name)


#: For servers without registered regions.
NO_REGIONS: Final = Regions()


def unknown_region(name: str) -> ConchError:
    return not_found(f"Unable to find shared memory region: '{name}'")
