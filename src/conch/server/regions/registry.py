"""The registry of client shared memory regions (``--allow-client-shm``).

Shared by all front ends; used on the event loop. Source of the messages: Triton's shared memory extension.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from conch.core.errors import Code, ConchError, invalid, not_found, unavailable, unsupported
from conch.core.tensors import Buffer, Loan, StoredData
from conch.machine.memory import children_of
from conch.server.regions.cuda import CudaRegion
from conch.server.regions.system import SystemRegion
from conch.wire.regions import Regions, unknown_region
from conch.workers.child.packing import INLINE_LIMIT

# Engines and libraries in workers create shared memory under names that any user can list. Detection works on Linux
# only; elsewhere nothing is found.


def is_mapped(file: os.stat_result, roots: Iterable[int], proc: Path = Path("/proc")) -> bool:
    """Whether one of the processes ``roots`` or a descendant has mapped or opened a file."""
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}", str(file.st_ino)
    return any(
        _maps(wanted, proc / str(pid)) or _opens(file, proc / str(pid)) for root in roots for pid in _family(root, proc)
    )


def _family(pid: int, proc: Path) -> Iterator[int]:
    yield pid
    for child in children_of(pid, proc):
        yield from _family(child, proc)


def _maps(wanted: tuple[str, str], process: Path) -> bool:
    """Whether a process has mapped the file with this device and inode, in the format of ``/proc/PID/maps``."""
    try:
        with open(process / "maps", "rb") as lines:
            return any(tuple(line.decode("latin-1").split(None, 5)[3:5]) == wanted for line in lines)
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
_KINDS: Final[dict[type[ClientRegion], str]] = {SystemRegion: "system", CudaRegion: "CUDA"}


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
            raise not_found(f"Unable to find {_KINDS[kind].lower()} shared memory region: '{name}'")
        if not isinstance(region, kind):
            raise not_found(
                f"The region named '{name}' is registered as {_KINDS[type(region)]} shared memory, not {_KINDS[kind]}"
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

    def place(self, output: str, name: str, offset: int, size: int) -> None:
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
