"""System shared memory: the layout of tensors in a region, and the region while it is registered.

The layout is pure; the measuring process owns the :class:`SharedRegion`. Source: Triton's system shared memory
extension.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from shutil import disk_usage
from typing import Any, Final, Protocol
from uuid import uuid4

from conch.core.errors import Code, ConchError, invalid, unsupported
from conch.core.tensors import ELEMENT_SIZE
from conch.measure.perf.inputs.specs import ModelSpec

#: Alignment of tensors (bytes).
_ALIGNED: Final = 64
#: The file system of shared memory in Linux.
_FOLDER: Final = "/dev/shm"
#: Pauses before each attempt to unregister a region, which the server may still use (s).
_PAUSES: Final = (0.0, 0.01, 0.1, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The location of a tensor in a region (bytes)."""

    region: str
    offset: int
    size: int

    @property
    def parameters(self) -> dict[str, Any]:
        """The request parameters for this location."""
        parameters: dict[str, Any] = {"shared_memory_region": self.region, "shared_memory_byte_size": self.size}
        return parameters | ({"shared_memory_offset": self.offset} if self.offset else {})


@dataclass
class MemoryLayout:
    """The layout of one region: ``outputs`` by name, then all inputs in order.

    All requests use the same locations for outputs, as in perf_analyzer: the outputs are never read.
    """

    region: str
    outputs: Mapping[str, MemoryPart]
    size: int
    contents: list[tuple[int, bytes]] = field(default_factory=list)

    @classmethod
    def of(cls, model: ModelSpec, batch_size: int, output_size: int) -> MemoryLayout:
        """Create a layout with a model's outputs; those of unknown size have ``output_size`` bytes per inference."""
        region = f"conch_perf_{uuid4().hex[:16]}"
        outputs, size = {}, 0
        for name, spec in model.outputs.items():
            sample_size = output_size
            if spec.datatype != "BYTES" and -1 not in spec.dims:
                sample_size = ELEMENT_SIZE[spec.datatype]
                for dim in spec.dims:
                    sample_size *= dim
            outputs[name] = MemoryPart(region, size, sample_size * batch_size)
            size += _rounded(sample_size * batch_size)
        return cls(region, outputs, size)

    def place(self, data: bytes) -> MemoryPart:
        """Add an input tensor; return its location."""
        part = MemoryPart(self.region, self.size, len(data))
        self.contents.append((self.size, data))
        self.size += _rounded(len(data))
        return part


def _rounded(size: int) -> int:
    return -(-max(1, size) // _ALIGNED) * _ALIGNED


class MemoryApi(Protocol):
    """The API by which a server registers regions."""

    def register_memory(self, region: str, key: str, size: int) -> None:
        """Register a region of ``size`` bytes under ``key``."""

    def unregister_memory(self, region: str) -> None:
        """Unregister a region."""


class SharedRegion:
    """A region with the data of all requests, registered until it is closed."""

    def __init__(self, layout: MemoryLayout, api: MemoryApi) -> None:
        """Raises INVALID_ARG for lack of memory, and UNSUPPORTED if the server cannot register the region."""
        self._api, self._region = api, layout.region
        self._memory = _create(layout.region, max(1, layout.size))
        try:
            for offset, data in layout.contents:
                assert self._memory.buf is not None
                self._memory.buf[offset : offset + len(data)] = data
            api.register_memory(layout.region, f"/{layout.region}", layout.size)
        except ConchError as error:
            self._free()
            raise unsupported(
                f"--shared-memory system: the server cannot register the region: {error.message} (it must run on"
                " this machine and have the extension system_shared_memory)"
            ) from None
        except BaseException:
            self._free()
            raise

    def close(self) -> None:
        """Unregister the region if the server responds, and free it.

        Triton refuses while it holds a request that uses the region, which can be for a short time after the response.
        """
        try:
            for pause in _PAUSES:
                time.sleep(pause)
                try:
                    return self._api.unregister_memory(self._region)
                except ConchError as error:
                    if error.code is not Code.INTERNAL:
                        return
        finally:
            self._free()

    def _free(self) -> None:
        self._memory.close()
        self._memory.unlink()


def _create(region: str, size: int) -> SharedMemory:
    """Create a region of ``size`` bytes after a check for space: the kernel kills a process that writes beyond it."""
    free = size
    with suppress(OSError):
        free = disk_usage(_FOLDER).free
    try:
        if free < size:
            raise OSError(f"{_FOLDER} has only {free:,} bytes free")
        return SharedMemory(region, create=True, size=size)
    except (OSError, ValueError, OverflowError) as error:
        raise invalid(f"--shared-memory system: a region of {size:,} bytes cannot be created: {error}") from None
