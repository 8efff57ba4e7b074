"""System shared memory: where the tensors of requests are in it, and the region itself while it is registered.

The layout is pure; :class:`SharedRegion` is of the process that measures.  Source: Triton's system shared memory
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

from conch.errors import Code, ConchError, invalid, unsupported
from conch.perf.inputs.specs import ModelSpec
from conch.tensors import ELEMENT_SIZE

#: Where tensors may begin (bytes).
_ALIGNED: Final = 64
#: Where Linux keeps regions.
_FOLDER: Final = "/dev/shm"
#: Before each attempt to have a server forget a region, which it may still use (s).
_PAUSES: Final = (0.0, 0.01, 0.1, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A tensor's place in a region (bytes)."""

    region: str
    offset: int
    size: int

    @property
    def parameters(self) -> dict[str, Any]:
        """What says so in a request."""
        found: dict[str, Any] = {"shared_memory_region": self.region, "shared_memory_byte_size": self.size}
        return found | ({"shared_memory_offset": self.offset} if self.offset else {})


@dataclass
class MemoryLayout:
    """Where everything is in one region: ``outputs`` by name, then all inputs as they come.

    Requests share the places of outputs, as perf_analyzer's do: nobody reads them.
    """

    region: str
    outputs: Mapping[str, MemoryPart]
    size: int
    contents: list[tuple[int, bytes]] = field(default_factory=list)

    @classmethod
    def of(cls, model: ModelSpec, batch_size: int, output_size: int) -> MemoryLayout:
        """Room for a model's outputs: ``output_size`` (bytes) for each inference where shapes do not tell."""
        region = f"conch_perf_{uuid4().hex[:16]}"
        outputs, size = {}, 0
        for name, spec in model.outputs.items():
            each = output_size
            if spec.datatype != "BYTES" and -1 not in spec.dims:
                each = ELEMENT_SIZE[spec.datatype]
                for dim in spec.dims:
                    each *= dim
            outputs[name] = MemoryPart(region, size, each * batch_size)
            size += _rounded(each * batch_size)
        return cls(region, outputs, size)

    def place(self, data: bytes) -> MemoryPart:
        """Give an input tensor a place."""
        part = MemoryPart(self.region, self.size, len(data))
        self.contents.append((self.size, data))
        self.size += _rounded(len(data))
        return part


def _rounded(size: int) -> int:
    return -(-max(1, size) // _ALIGNED) * _ALIGNED


class MemoryApi(Protocol):
    """A server that can be told of regions."""

    def register_memory(self, region: str, key: str, size: int) -> None:
        """Tell the server of a region of ``size`` bytes under ``key``."""

    def unregister_memory(self, region: str) -> None:
        """Let the server forget it."""


class SharedRegion:
    """A region with the data of all requests, which a server knows until it is closed."""

    def __init__(self, layout: MemoryLayout, api: MemoryApi) -> None:
        """Raises INVALID_ARG for want of room, UNSUPPORTED for a server that takes none or is on another machine."""
        self._api, self._region = api, layout.region
        self._memory = _made(layout.region, max(1, layout.size))
        try:
            for offset, data in layout.contents:
                assert self._memory.buf is not None
                self._memory.buf[offset : offset + len(data)] = data
            api.register_memory(layout.region, f"/{layout.region}", layout.size)
        except ConchError as error:
            self._free()
            raise unsupported(
                f"--shared-memory system: the server does not take the region: {error.message} (it has to be on this"
                " machine, and to have the extension system_shared_memory)"
            ) from None
        except BaseException:
            self._free()
            raise

    def close(self) -> None:
        """Let the server forget the region, if it still answers, and free it.

        Triton refuses that while it holds a request with the region, which may be for a moment after its answer.
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


def _made(region: str, size: int) -> SharedMemory:
    """A region of ``size`` bytes for which there is room: the kernel ends a process that writes where there is none."""
    free = size
    with suppress(OSError):
        free = disk_usage(_FOLDER).free
    try:
        if free < size:
            raise OSError(f"{_FOLDER} has room for {free:,}")
        return SharedMemory(region, create=True, size=size)
    except (OSError, ValueError, OverflowError) as error:
        raise invalid(f"--shared-memory system: there is no region of {size:,} bytes: {error}") from None
