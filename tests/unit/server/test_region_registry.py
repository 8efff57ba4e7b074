"""Registered regions: names, kinds, bounds, whose memory they are, and requests that use them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from uuid import uuid4

import pytest

from conch.core.errors import Code, ConchError, unavailable
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import WireTensor
from conch.server.regions import MOST_REGIONS, ClientRegions, CudaRegion, HeldRegions, SystemRegion, is_mapped
from conch.workers.child.buffers import BufferMap, BufferPool
from conch.workers.child.packing import INLINE_LIMIT, Packer, Unpacker

SIZE = 4 * INLINE_LIMIT


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory(f"conch_test_{uuid4().hex[:12]}", create=True, size=SIZE)
    yield memory
    memory.close()
    memory.unlink()


@pytest.fixture
async def regions(memory: SharedMemory) -> ClientRegions:
    """With the region ``r``."""
    regions = ClientRegions(True, list, ())
    await regions.register_system("r", memory.name, 0, SIZE)
    return regions


def held(regions: ClientRegions) -> HeldRegions:
    return regions.held_by(lambda size: None)


def output(size: int, name: str = "O") -> InferResponse:
    return InferResponse([WireTensor(name, "UINT8", (size,), b"\x07" * size)])


async def test_a_name_is_registered_once(regions: ClientRegions, memory: SharedMemory) -> None:
    with pytest.raises(ConchError, match="shared memory region 'r' already in manager") as caught:
        await regions.register_system("r", memory.name, 0, 4)
    assert caught.value.code is Code.ALREADY_EXISTS
    await regions.register_system("again", memory.name, 0, 4)
    assert [one["name"] for one in regions.status(SystemRegion)] == ["again", "r"]


async def test_there_are_no_more_regions_than_descriptors_for_them(
    regions: ClientRegions, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_REGIONS >= 1000
    monkeypatch.setattr("conch.server.regions.MOST_REGIONS", 1)
    with pytest.raises(ConchError, match="1 shared memory regions are registered, which is the maximum"):
        await regions.register_system("s", memory.name, 0, 4)


async def test_status_and_unregistering_keep_to_a_kind(regions: ClientRegions) -> None:
    assert regions.status(CudaRegion) == []
    with pytest.raises(ConchError, match="named 'r' is registered as system shared memory, not CUDA shared memory"):
        regions.status(CudaRegion, "r")
    with pytest.raises(ConchError, match="Unable to find cuda shared memory region: 'x'"):
        regions.status(CudaRegion, "x")
    regions.unregister(CudaRegion, "r")
    regions.unregister(CudaRegion)
    assert regions
    regions.unregister(SystemRegion, "absent")
    regions.unregister(SystemRegion)
    assert not regions


async def test_memory_of_a_worker_is_no_clients(memory: SharedMemory) -> None:
    program = (
        f"import mmap,os; f=os.open('/dev/shm/{memory.name}',os.O_RDWR); m=mmap.mmap(f,10); os.close(f); print(1);"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", program + "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert worker.stdout is not None and worker.stdout.readline()
        regions = ClientRegions(True, lambda: [worker.pid], ())
        with pytest.raises(ConchError, match="it is memory of the server's own"):
            await regions.register_system("r", memory.name, 0, 10)
        assert not regions
    finally:
        worker.communicate(b"\n")
    await regions.register_system("r", memory.name, 0, 10)


async def test_memory_of_a_client_stays_the_clients_when_a_worker_has_it_open(memory: SharedMemory) -> None:
    regions = ClientRegions(True, lambda: [os.getpid()], ())
    with open(f"/dev/shm/{memory.name}", "rb"), pytest.raises(ConchError, match="it is memory of the server's own"):
        await regions.register_system("r", memory.name, 0, 10)
    workers: list[int] = []
    lent = ClientRegions(True, lambda: workers, ())
    await lent.register_system("r", memory.name, 0, 10)
    workers.append(os.getpid())
    with open(f"/dev/shm/{memory.name}", "rb"):
        await lent.register_system("same", memory.name, 0, 10)
        lent.unregister(SystemRegion)
        await lent.register_system("again", memory.name, 0, 10)


def test_a_file_that_is_open_and_not_mapped_belongs_to_its_process_too(memory: SharedMemory) -> None:
    with open(f"/dev/shm/{memory.name}", "rb") as file:
        assert is_mapped(os.fstat(file.fileno()), [os.getpid()])
    with mmap.mmap(-1, 10), open("/proc/self/status", "rb") as other:
        assert is_mapped(os.fstat(other.fileno()), [os.getpid()])
        assert not is_mapped(os.fstat(other.fileno()), [])


async def test_gpus_are_needed_for_their_memory(regions: ClientRegions) -> None:
    with pytest.raises(ConchError, match="failed to register CUDA shared memory region: 'g', GPUs not supported"):
        regions.register_cuda("g", bytes(64), 0, 4)


@pytest.mark.parametrize(
    ("offset", "size", "text"),
    [
        (SIZE, 1, "Invalid offset for"),
        (2**64 - 1, 1, "Invalid offset for"),
        (SIZE - 1, 2, "Invalid offset + byte size for"),
        (0, 0, "Invalid offset + byte size for"),
        (4, 2**64 - 1, "Invalid offset + byte size for"),
    ],
)
async def test_what_is_outside_of_a_region_is_refused(
    regions: ClientRegions, offset: int, size: int, text: str
) -> None:
    for use in (held(regions).read, held(regions).set_target):
        with pytest.raises(ConchError) as caught:
            use("UINT8", "r", offset, size)
        assert (caught.value.code, caught.value.message) == (
            Code.INVALID_ARG, f"{text} shared memory region: 'r'",
        )  # fmt: skip


async def test_small_inputs_and_texts_are_copied_and_counted(regions: ClientRegions, memory: SharedMemory) -> None:
    counted: list[int] = []
    data = regions.held_by(counted.append).read("BYTES", "r", 0, SIZE)
    regions.held_by(counted.append).read("FP32", "r", 4, 8)
    assert counted == [SIZE, 8]
    memory.buf[0] = 1
    assert bytes(data) == bytes(SIZE)


async def test_a_large_input_is_counted_when_somebody_is_about_to_copy_it(regions: ClientRegions) -> None:
    counted: list[int] = []
    data = regions.held_by(counted.append).read("UINT8", "r", 0, SIZE)
    assert not counted
    InferRequest("m", {"x": WireTensor("x", "UINT8", (SIZE,), data)}, lambda response: None).hold_copies()
    assert counted == [SIZE]


async def test_a_server_that_holds_too_many_bytes_refuses_before_it_reads(regions: ClientRegions) -> None:
    def refuse(size: int) -> None:
        raise unavailable("full")

    with pytest.raises(ConchError, match="full"):
        regions.held_by(refuse).read("BYTES", "r", 0, SIZE)


def packed(data: object, size: int) -> bytes:
    """What a worker sees of an input."""
    pool, packer, buffers = BufferPool(), Packer(), BufferMap()
    descriptor = packer.add("IN", "UINT8", [size], data)  # type: ignore[arg-type]
    packer.fill_buffer(pool)
    [file], _ = pool.take_changes()
    buffers.add_file(file.id, os.dup(file.fd))
    [tensor] = Unpacker(b"", buffers).unpack([descriptor])
    pool.close()
    buffers.close()
    return bytes(tensor.data)


async def test_large_inputs_are_read_when_they_are_packed(regions: ClientRegions, memory: SharedMemory) -> None:
    shared = held(regions)
    data = shared.read("UINT8", "r", 1, INLINE_LIMIT)
    memory.buf[: INLINE_LIMIT + 1] = b"\x05" * (INLINE_LIMIT + 1)
    assert len(data) == INLINE_LIMIT
    assert packed(data, INLINE_LIMIT) == bytes(data) == b"\x05" * INLINE_LIMIT
    shared.deliver(output(1))


async def test_an_input_that_is_gone_fails_its_own_request_alone(regions: ClientRegions, memory: SharedMemory) -> None:
    gone, whole = held(regions), held(regions)
    inputs = [one.read("UINT8", "r", start, INLINE_LIMIT) for one, start in ((gone, INLINE_LIMIT), (whole, 0))]
    os.truncate(f"/dev/shm/{memory.name}", INLINE_LIMIT)
    assert [packed(data, INLINE_LIMIT) for data in inputs] == [bytes(INLINE_LIMIT)] * 2
    whole.deliver(output(1))
    with pytest.raises(ConchError, match="shared memory region 'r' has become smaller"):
        gone.deliver(output(1))
    os.truncate(f"/dev/shm/{memory.name}", SIZE)


async def test_outputs_go_to_their_places_whether_or_not_a_worker_put_them_there(
    regions: ClientRegions, memory: SharedMemory
) -> None:
    shared = held(regions)
    shared.set_target("O", "r", 8, 4)
    shared.set_target("P", "r", 16, 4)
    assert shared.put("O", b"here")
    assert not shared.put("Q", b"nowhere")
    assert not shared.put("P", b"too long")
    response = InferResponse(
        [WireTensor("O", "UINT8", (4,), b""), WireTensor("P", "UINT8", (4,), b"late"), *output(2, "Q").outputs]
    )
    shared.deliver(response)
    assert bytes(memory.buf[8:20]) == b"here\0\0\0\0late"
    assert [bytes(tensor.data) for tensor in response.outputs] == [b"", b"", b"\x07\x07"]


async def test_nothing_is_written_when_an_output_is_too_large(regions: ClientRegions, memory: SharedMemory) -> None:
    shared = held(regions)
    shared.set_target("O", "r", 0, 4)
    shared.set_target("P", "r", 8, 4)
    with pytest.raises(ConchError) as caught:
        shared.deliver(InferResponse([*output(4).outputs, *output(5, "P").outputs]))
    assert (caught.value.code, caught.value.message) == (
        Code.INTERNAL,
        "shared memory size specified with the request for output 'P' (4 bytes) should be at least 5 bytes to hold the"
        " results",
    )
    assert bytes(memory.buf[:16]) == bytes(16)


async def test_a_region_that_is_unregistered_serves_the_requests_that_have_it(
    regions: ClientRegions, memory: SharedMemory
) -> None:
    shared = held(regions)
    shared.set_target("O", "r", 0, 4)
    data = shared.read("UINT8", "r", 0, INLINE_LIMIT)
    regions.unregister(SystemRegion, "r")
    memory.buf[4] = 9
    shared.deliver(output(4))
    assert packed(data, INLINE_LIMIT)[:6] == b"\x07\x07\x07\x07\x09\x00"
    with pytest.raises(ConchError, match="Unable to find shared memory region: 'r'"):
        held(regions).read("UINT8", "r", 0, 4)


async def test_a_worker_writes_large_outputs_for_itself_unless_others_need_them(regions: ClientRegions) -> None:
    shared = held(regions)
    shared.set_target("small", "r", 0, INLINE_LIMIT - 1)
    shared.set_target("large", "r", 8, INLINE_LIMIT)
    loans = shared.loans()
    assert {name: loan[2:] for name, loan in loans.items()} == {"large": (8, INLINE_LIMIT)}
    assert shared.lends("large")
    assert not shared.lends("small")
    assert not shared.lends("other")
    shared.copies = True
    assert not shared.loans()
    assert not shared.lends("large")


def test_clients_may_register_regions_only_where_the_server_allows_it() -> None:
    ClientRegions(True, list, ()).require()
    with pytest.raises(ConchError) as caught:
        ClientRegions(False, list, ()).require()
    assert (caught.value.code, caught.value.message) == (
        Code.UNSUPPORTED,
        "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.",
    )
