"""A client's region of GPU memory, opened by its handle through the CUDA driver.

The driver (``libcuda``) is called directly, so that the server needs no framework; the first call creates a context of
the process on the GPU. Used on the event loop.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

from conch.core.errors import ConchError, internal, invalid
from conch.core.tensors import Buffer

#: The size of a handle, ``cudaIpcMemHandle_t`` (bytes).
HANDLE_SIZE: Final = 64
_LAZY_PEER_ACCESS: Final = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_SIZE),)


class CudaRegion:
    """``size`` bytes of memory on GPU ``device``; open as long as this object exists."""

    def __init__(self, name: str, handle: bytes, device: int, size: int) -> None:
        """Open the memory. Raises INVALID_ARG if the driver rejects the handle or the memory is too small."""
        self.name, self.device, self.size = name, device, size
        self._pointer = ctypes.c_uint64()
        failure = invalid("failed to register shared memory region: invalid args")
        if not size or len(handle) != HANDLE_SIZE:
            raise failure
        try:
            self._context = _context(device)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(self._pointer), _IpcHandle(handle), _LAZY_PEER_ACCESS)
            base, length = ctypes.c_uint64(), ctypes.c_size_t()
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(length), self._pointer)
        except ConchError:
            raise failure from None
        if self._pointer.value + size > base.value + length.value:
            raise failure

    @property
    def status(self) -> dict[str, str | int]:
        """The status of the region for clients."""
        return {"name": self.name, "device_id": self.device, "byte_size": self.size}

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``offset``; both must fit. Raises INTERNAL if the driver fails."""
        size = len(target)
        there = (ctypes.c_char * size).from_buffer(target)
        self._call("cuMemcpyDtoH_v2", there, ctypes.c_uint64(self._pointer.value + offset), ctypes.c_size_t(size))

    def write(self, offset: int, data: Buffer) -> None:
        """Write data that fits into the region. Raises INTERNAL if the driver fails."""
        plain = bytes(data)
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(self._pointer.value + offset), plain, ctypes.c_size_t(len(plain)))

    def loan(self, offset: int, size: int) -> None:
        """Return None: GPU memory has no file that a worker can use."""

    def require(self, end: int) -> None:
        """Do nothing: a client cannot truncate open GPU memory."""

    def _call(self, function: str, *arguments: Any) -> None:
        _check("cuCtxSetCurrent", self._context)
        _check(function, *arguments)

    def __del__(self) -> None:
        if self._pointer.value:
            try:
                self._call("cuIpcCloseMemHandle", self._pointer)
            except ConchError:  # the client has ended, and its memory is gone
                pass


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise internal(f"the CUDA driver cannot be loaded: {error}") from None
    if driver.cuInit(0):
        raise internal("the CUDA driver does not start")
    return driver


@cache
def _context(device: int) -> ctypes.c_void_p:
    """The primary context of a GPU, shared within this process."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _check("cuDeviceGet", ctypes.byref(number), device)
    _check("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    return context


def _check(function: str, *arguments: Any) -> None:
    """Call a driver function; raises INTERNAL with its name and code if it fails."""
    code = getattr(_driver(), function)(*arguments)
    if code:
        raise internal(f"CUDA: {function} failed with code {code}")
