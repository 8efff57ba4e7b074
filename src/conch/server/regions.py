"""Shared memory regions that clients register (``--allow-client-shm``), and the tensors of requests in them.

``ClientRegions`` is the registry, shared by all front ends: it opens regions of POSIX shared memory (``SystemRegion``)
and of GPU memory (``CudaRegion``). The decoders of a request resolve its references through ``HeldRegions``. Used on
the event loop. Source of the messages: Triton's shared memory extension.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from conch.core.errors import Code, ConchError, internal, invalid, not_found, unavailable, unsupported
from conch.core.tensors import Buffer, Loan, StoredData
from conch.machine.memory import children_of
from conch.wire.regions import Regions, unknown_region
from conch.workers.child.buffers import read_at, write_at
from conch.workers.child.packing import INLINE_LIMIT

# A client's region of POSIX shared memory, opened by its key and accessed through its file. The file is never mapped: a
# client may truncate it at any time, and an access to a mapping beyond the end of the file kills the process. ``pread``
# returns no data instead.


#: The directory of named shared memory on Linux.
SHARED_MEMORY: Final = Path("/dev/shm")
#: Name prefix of the shared memory of Triton's own processes.
_RESERVED: Final = "triton_python_backend_shm_region_"


class SystemRegion:
    """``size`` bytes at ``offset`` of the shared memory ``key``.

    It stays open as long as this object exists, even if the client removes the name.
    """

    def __init__(self, name: str, key: str, offset: int, size: int, folder: Path = SHARED_MEMORY) -> None:
        """Open the memory.

        Raises INTERNAL if it does not exist, INVALID_ARG for a reserved key or a part outside of the memory.
        """
        self.name, self.key, self.offset, self.size = name, key, offset, size
        self._fd = -1
        plain = key.lstrip("/")
        if plain.startswith(_RESERVED):
            raise invalid(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved"
                f" prefix '{_RESERVED}'"
            )
        self._fd = _opened(folder, plain, key)
        try:
            self._check()
        except ConchError:
            self._close()  # at once: the error keeps this object alive as long as it is referenced
            raise

    def _check(self) -> None:
        """Raise unless the file can be a client's shared memory and contains the region."""
        file_stat = self.file
        # A hard link may be a file that is not the client's.
        if not stat.S_ISREG(file_stat.st_mode) or file_stat.st_nlink > 1:
            raise _not_opened(self.key)
        problem = ""
        if self.offset + self.size > file_stat.st_size:
            problem = "invalid args"
        elif not self.size or self.offset % os.sysconf("SC_PAGE_SIZE"):
            problem = "unable to process address space" + os.strerror(errno.EINVAL)
        if problem:
            raise invalid(f"failed to register shared memory region '{self.name}': {problem}")

    @property
    def file(self) -> os.stat_result:
        """The ``stat`` result of the file."""
        return os.fstat(self._fd)

    @property
    def status(self) -> dict[str, str | int]:
        """The status of the region for clients."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.size}

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``offset``, which must be in the region.

        Raises INVALID_ARG if the client has truncated the memory, INTERNAL if it cannot be read.
        """
        try:
            whole = read_at(self._fd, target, self.offset + offset)
        except OSError as error:
            raise internal(f"shared memory region '{self.name}' cannot be read: {error.strerror}") from None
        if not whole:
            raise self._shortened()

    def write(self, offset: int, data: Buffer) -> None:
        """Write data that fits into the region; raises as :meth:`read_into`."""
        try:
            whole = write_at(self._fd, data, self.offset + offset)
        except OSError as error:
            raise internal(f"shared memory region '{self.name}' cannot be written: {error.strerror}") from None
        if not whole:
            raise self._shortened()

    def loan(self, offset: int, size: int) -> Loan:
        """A part of the region that a worker can read or write directly."""
        return Loan(self, self._fd, self.offset + offset, size)

    def require(self, end: int) -> None:
        """Raise INVALID_ARG if the client has truncated the region to less than ``end`` bytes."""
        if self.offset + end > self.file.st_size:
            raise self._shortened()

    def _shortened(self) -> ConchError:
        return invalid(f"shared memory region '{self.name}' has become smaller than when it was registered")

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self._close()


def _opened(folder: Path, plain: str, key: str) -> int:
    """Open a file as ``shm_open`` does, without following links or blocking; returns its descriptor."""
    if not plain or "/" in plain:
        raise _not_opened(key)
    try:
        return os.open(folder / plain, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        raise _not_opened(key) from None


def _not_opened(key: str) -> ConchError:
    return internal(f"Unable to open shared memory region: '{key}'")


# A client's region of GPU memory, opened by its handle through the CUDA driver. The driver (``libcuda``) is called
# directly, so that the server needs no framework; the first call creates a context of the process on the GPU.


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
        destination = (ctypes.c_char * size).from_buffer(target)
        self._call("cuMemcpyDtoH_v2", destination, ctypes.c_uint64(self._pointer.value + offset), ctypes.c_size_t(size))

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


# Engines and libraries in workers create shared memory under names that any user can list. Detection works on Linux
# only; elsewhere nothing is found.


def is_mapped(file: os.stat_result, roots: Iterable[int], proc: Path = Path("/proc")) -> bool:
    """Whether one of the processes ``roots`` or a descendant has mapped or opened a file."""
    device_and_inode = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}", str(file.st_ino)
    return any(
        _maps(device_and_inode, proc / str(pid)) or _opens(file, proc / str(pid))
        for root in roots
        for pid in _family(root, proc)
    )


def _family(pid: int, proc: Path) -> Iterator[int]:
    yield pid
    for child in children_of(pid, proc):
        yield from _family(child, proc)


def _maps(device_and_inode: tuple[str, str], process: Path) -> bool:
    """Whether a process has mapped the file with this device and inode, in the format of ``/proc/PID/maps``."""
    try:
        with open(process / "maps", "rb") as lines:
            return any(tuple(line.decode("latin-1").split(None, 5)[3:5]) == device_and_inode for line in lines)
    except OSError:  # the process has ended
        return False


def _opens(file: os.stat_result, process: Path) -> bool:
    try:
        descriptors = os.listdir(process / "fd")
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            if os.path.samestat(os.stat(process / "fd" / descriptor), file):
                return True
        except OSError:  # it was just closed
            continue
    return False


ClientRegion = SystemRegion | CudaRegion

#: Maximum number of regions: each needs a file descriptor.
MOST_REGIONS: Final = 1024
#: Maximum number of remembered client files.
_MOST_KNOWN: Final = 4 * MOST_REGIONS
#: Inputs of at least this size (bytes) are copied only when worker memory is available for them.
_COPIED_LATER: Final = INLINE_LIMIT
KINDS: Final[dict[type[ClientRegion], str]] = {SystemRegion: "system", CudaRegion: "CUDA"}


class ClientRegions:
    """The registered regions by name; false while there are none.

    ``workers`` returns the process ids of the server's workers; ``gpus`` are the available GPUs.
    """

    def __init__(self, allowed: bool, workers: Callable[[], Iterable[int]], gpus: tuple[int, ...]) -> None:
        self._allowed = allowed
        self._workers = workers
        self._gpus = gpus
        self._regions: dict[str, ClientRegion] = {}
        # Device and inode of files that were accepted as a client's: workers may have opened them since.
        self._known: dict[tuple[int, int], None] = {}

    def __bool__(self) -> bool:
        return bool(self._regions)

    def require(self) -> None:
        """Raise UNSUPPORTED unless clients may register regions."""
        if not self._allowed:
            raise unsupported(
                "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
            )

    async def register_system(self, name: str, key: str, offset: int, size: int) -> None:
        """Register a part of the shared memory ``key``.

        Raises ALREADY_EXISTS for a name in use, UNAVAILABLE if there are too many regions, and INVALID_ARG or INTERNAL
        if the memory cannot be a client's region.
        """
        self._require_new(name)
        region = SystemRegion(name, key, offset, size)
        file = region.file
        identity = file.st_dev, file.st_ino
        if identity not in self._known and await asyncio.to_thread(is_mapped, file, list(self._workers())):
            raise invalid(
                f"cannot register shared memory region '{name}' with key '{key}': it is memory of the server's own"
            )
        self._require_new(name)
        self._regions[name] = region
        self._known.pop(identity, None)
        self._known[identity] = None
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def register_cuda(self, name: str, handle: bytes, device: int, size: int) -> None:
        """Register GPU memory by its CUDA IPC handle; raises as :meth:`register_system`."""
        self._require_new(name)
        if not self._gpus:
            raise invalid(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")
        self._regions[name] = CudaRegion(name, handle, device, size)

    def unregister(self, kind: type[ClientRegion], name: str = "") -> None:
        """Remove a region of a kind, or all regions of the kind; in-flight requests keep theirs until they end."""
        if not name:
            self._regions = {name: region for name, region in self._regions.items() if not isinstance(region, kind)}
        elif isinstance(self._regions.get(name), kind):
            del self._regions[name]

    def status(self, kind: type[ClientRegion], name: str = "") -> list[dict[str, Any]]:
        """The status of a region, or of all regions of a kind. Raises NOT_FOUND for an unknown region."""
        if not name:
            return [region.status for _, region in sorted(self._regions.items()) if isinstance(region, kind)]
        region = self._regions.get(name)
        if region is None:
            raise not_found(f"Unable to find {KINDS[kind].lower()} shared memory region: '{name}'")
        if not isinstance(region, kind):
            raise not_found(
                f"The region named '{name}' is registered as {KINDS[type(region)]} shared memory, not {KINDS[kind]}"
                " shared memory"
            )
        return [region.status]

    def held_by(self, hold: Callable[[int], None]) -> HeldRegions:
        """The regions for one request; ``hold`` counts the bytes that are copied."""
        return HeldRegions(self._regions, hold)

    def _require_new(self, name: str) -> None:
        if name in self._regions:
            raise ConchError(f"shared memory region '{name}' already in manager", Code.ALREADY_EXISTS)
        if len(self._regions) >= MOST_REGIONS:
            raise unavailable(
                f"{MOST_REGIONS} shared memory regions are registered, which is the maximum: unregister some"
            )


class HeldRegions(Regions):
    """The tensors of one request in regions; ``hold`` counts the bytes that are copied and raises to refuse them."""

    __slots__ = ("_hold", "_regions")

    def __init__(self, regions: dict[str, ClientRegion], hold: Callable[[int], None]) -> None:
        super().__init__()
        self._regions = regions
        self._hold = hold

    def read(self, datatype: str, name: str, offset: int, size: int) -> Any:
        region = self._find(name, offset, size)
        if size >= _COPIED_LATER and datatype != "BYTES":  # lengths of BYTES elements must not change after their check
            source = RegionData(region, offset, size, self._hold)
            self.sources.append(source)
            return source
        self._hold(size)
        data = bytearray(size)
        region.read_into(offset, memoryview(data))
        return data

    def set_target(self, output: str, name: str, offset: int, size: int) -> None:
        self.output_targets[output] = RegionTarget(self._find(name, offset, size), offset, size)

    def _find(self, name: str, offset: int, size: int) -> ClientRegion:
        region = self._regions.get(name)
        if region is None:
            raise unknown_region(name)
        if offset >= region.size:
            raise invalid(f"Invalid offset for shared memory region: '{name}'")
        if not size or offset + size > region.size:
            raise invalid(f"Invalid offset + byte size for shared memory region: '{name}'")
        return region


class RegionData(StoredData):
    """An input that is read when its request runs; keeps the region open. ``count`` counts the bytes of a copy."""

    __slots__ = ("_count", "_error", "_lent", "_offset", "_region", "_size")

    def __init__(self, region: ClientRegion, offset: int, size: int, count: Callable[[int], None]) -> None:
        self._count = count
        self._region = region
        self._offset = offset
        self._size = size
        self._error: ConchError | None = None
        self._lent = False

    def __len__(self) -> int:
        return self._size

    def lend(self) -> Loan | None:
        loan = self._region.loan(self._offset, self._size)
        self._lent = loan is not None
        return loan

    def hold(self) -> None:
        self._count(self._size)

    def read_into(self, target: memoryview) -> None:
        try:
            self._region.read_into(self._offset, target)
        except ConchError as error:
            # Other requests share the batch, so this request fails only when it ends.
            self._error = error
            target[:] = bytes(len(target))

    def require_whole(self) -> None:
        if self._error is not None:
            raise self._error
        if self._lent:
            self._region.require(self._offset + self._size)


class RegionTarget:
    """A part of a region for an output; keeps the region open."""

    __slots__ = ("_offset", "_region", "_size")

    def __init__(self, region: ClientRegion, offset: int, size: int) -> None:
        self._region = region
        self._offset = offset
        self._size = size

    def check(self, output: str, size: int) -> None:
        if size > self._size:
            raise ConchError(
                f"shared memory size specified with the request for output '{output}' ({self._size} bytes) should be at"
                f" least {size} bytes to hold the results"
            )

    def lend(self) -> Loan | None:
        if self._size < INLINE_LIMIT:
            return None
        return self._region.loan(self._offset, self._size)

    def write(self, data: Buffer) -> None:
        self._region.write(self._offset, data)
