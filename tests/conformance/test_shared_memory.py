"""System shared memory: the same regions and requests for conch and the real Triton, over both protocols."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from tests.conformance.calls import Call, call
from tests.conformance.clients import Client, floats
from tests.conformance.raw import Reply, Request, pack_strings, post, send
from tests.conftest import Server, Start
from tests.events import eventually
from tests.models import build

#: Half of the memory: whole pages, and more than fits in a message to a worker.
HALF = 64 * 4096
MODELS = ("identity_fp32", "identity_string", "add_sub", "chain", "plus_one", "repeat")


@pytest.fixture(scope="module")
def sharing(start: Start, server_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Each server, with shared memory enabled."""
    repository = build(tmp_path_factory.mktemp("shared") / "models", *MODELS)
    flags = ["--allow-client-shm=true"] if server_kind == "conch" else []
    with start(repository, *flags) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, sharing: Server) -> Client:
    return Client(request.param, sharing)


class Memory:
    """Shared memory of the test, with a new key for each region."""

    def __init__(self) -> None:
        self.name = f"conch_conformance_{uuid4().hex[:12]}"
        self.path = Path("/dev/shm", self.name)
        self.path.write_bytes(bytes(2 * HALF))
        with self.path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 2 * HALF)
        self._slashes = 0

    @property
    def key(self) -> str:
        """Return a new key: Triton 2.51 registers each key only once."""
        self._slashes += 1
        return "/" * self._slashes + self.name


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.map.close()
    memory.path.unlink()


@pytest.fixture
def region(client: Client, memory: Memory) -> Iterator[str]:
    """Register the whole memory as a region."""
    client.api.register_system_shared_memory("r", memory.key, 2 * HALF)
    yield "r"
    unregister_all(client.server)


def unregister_all(server: Server) -> None:
    """Unregister every region.

    Triton 2.51 refuses this while a request uses a region, and may release a request after its response was sent.
    """
    path = "/v2/systemsharedmemory/unregister"
    eventually(lambda: send(server.http, Request("POST", path)).status == 200, "unregistering")


def shared_input(client: Client, name: str, shape: list[int], datatype: str, size: int, offset: int = 0) -> Any:
    tensor = client.module.InferInput(name, shape, datatype)
    tensor.set_shared_memory("r", size, offset)
    return tensor


def shared_output(client: Client, name: str, size: int, offset: int) -> Any:
    output = client.module.InferRequestedOutput(name)
    output.set_shared_memory("r", size, offset)
    return output


def test_input_and_output_in_a_region(client: Client, memory: Memory, region: str) -> None:
    memory.map[8:20] = floats(1, 2, 3).tobytes()
    inputs = [shared_input(client, "INPUT", [3], "FP32", 12, 8)]
    answer = client.api.infer("identity_fp32", inputs, outputs=[shared_output(client, "OUTPUT", 100, 64)])
    described = answer.get_output("OUTPUT")
    shape = described["shape"] if client.protocol == "http" else list(described.shape)
    assert [int(size) for size in shape] == [3]
    assert memory.map[64:80] == floats(1, 2, 3, 0).tobytes()


def test_large_tensors_in_a_region(client: Client, memory: Memory, region: str) -> None:
    for turn in range(3):
        numbers = np.arange(HALF // 4, dtype=np.float32) + turn
        memory.map[4 : HALF - 4] = numbers.tobytes()[8:]
        inputs = [shared_input(client, "INPUT", [HALF // 4 - 2], "FP32", HALF - 8, 4)]
        client.api.infer("identity_fp32", inputs, outputs=[shared_output(client, "OUTPUT", HALF, HALF)])
        assert memory.map[HALF : 2 * HALF - 8] == numbers.tobytes()[8:]
    text = (
        f"shared memory size specified with the request for output 'OUTPUT' ({HALF - 12} bytes) should be at least"
        f" {HALF - 8} bytes to hold the results"
    )
    with client.refused("INTERNAL", text):
        client.api.infer("identity_fp32", inputs, outputs=[shared_output(client, "OUTPUT", HALF - 12, HALF)])


def test_one_input_and_one_output_of_two_are_in_a_region(client: Client, memory: Memory, region: str) -> None:
    numbers = np.arange(16, dtype=np.int32)
    memory.map[:64] = numbers.tobytes()
    inputs = [shared_input(client, "INPUT0", [16], "INT32", 64), client.input("INPUT1", numbers)]
    outputs = [shared_output(client, "OUTPUT1", 64, HALF), client.module.InferRequestedOutput("OUTPUT0")]
    answer = client.api.infer("add_sub", inputs, outputs=outputs)
    assert answer.as_numpy("OUTPUT0").tolist() == (2 * numbers).tolist()
    assert memory.map[HALF : HALF + 64] == bytes(64)


def test_texts_are_in_a_region_as_they_are_sent(client: Client, memory: Memory, region: str) -> None:
    data = pack_strings(b"a", "ä€".encode())
    memory.map[: len(data)] = data
    inputs = [shared_input(client, "TEXT", [2, 1], "BYTES", len(data))]
    client.api.infer("identity_string", inputs, outputs=[shared_output(client, "OUTPUT", 100, 200)])
    assert memory.map[200 : 200 + len(data) + 1] == data + b"\0"


def test_an_ensemble_begins_and_ends_in_a_region(client: Client, memory: Memory, region: str) -> None:
    memory.map[:8] = floats(1, 2).tobytes()
    inputs = [shared_input(client, "X", [1, 2], "FP32", 8)]
    client.api.infer("chain", inputs, outputs=[shared_output(client, "Y", 8, 8)])
    assert memory.map[8:16] == floats(3, 4).tobytes()


def test_an_output_that_does_not_fit_is_refused_and_not_written(client: Client, memory: Memory, region: str) -> None:
    memory.map[:8] = floats(1, 2).tobytes()
    inputs = [shared_input(client, "INPUT", [2], "FP32", 8)]
    text = (
        "shared memory size specified with the request for output 'OUTPUT' (4 bytes) should be at least 8 bytes to hold"
        " the results"
    )
    with client.refused("INTERNAL", text):
        client.api.infer("identity_fp32", inputs, outputs=[shared_output(client, "OUTPUT", 4, 64)])
    assert memory.map[64:72] == bytes(8)


def test_status_tells_what_is_registered(client: Client, memory: Memory, region: str) -> None:
    second = memory.key
    client.api.register_system_shared_memory("s", second, HALF, HALF)
    status = client.api.get_system_shared_memory_status()
    if client.protocol == "grpc":
        status = [
            {name: getattr(one, name) for name in ("name", "key", "offset", "byte_size")}
            for _, one in sorted(status.regions.items())
        ]
    assert status == [
        {"name": "r", "key": f"/{memory.name}", "offset": 0, "byte_size": 2 * HALF},
        {"name": "s", "key": second, "offset": HALF, "byte_size": HALF},
    ]
    client.api.unregister_system_shared_memory("s")
    with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 's'"):
        client.api.get_system_shared_memory_status("s")


def test_a_region_that_is_unlinked_stays_usable(client: Client, memory: Memory, region: str) -> None:
    memory.map[:4] = floats(5).tobytes()
    kept = memory.path.rename(memory.path.with_name(memory.name + "_kept"))
    try:
        inputs = [shared_input(client, "INPUT", [1], "FP32", 4)]
        assert client.api.infer("identity_fp32", inputs).as_numpy("OUTPUT").tolist() == [5]
    finally:
        kept.rename(memory.path)


def region_of(address: str, memory: Memory, offset: Any = 0, size: Any = HALF, key: str | None = None) -> Reply:
    body = {"key": memory.key if key is None else key, "offset": offset, "byte_size": size}
    return post(address, "/v2/systemsharedmemory/region/r/register", body)


@pytest.mark.parametrize(
    ("offset", "size", "status", "text"),
    [
        (HALF, HALF + 1, 400, "failed to register shared memory region 'r': invalid args"),
        (100, 100, 400, "failed to register shared memory region 'r': unable to process address spaceInvalid argument"),
        (0, 0, 400, "failed to register shared memory region 'r': unable to process address spaceInvalid argument"),
        (-1, 4, 500, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        (0, "4", 500, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
    ],
)
def test_a_wrong_part_is_not_registered(
    sharing: Server, memory: Memory, offset: Any, size: Any, status: int, text: str
) -> None:
    reply = region_of(sharing.http, memory, offset, size)
    assert (reply.status, reply.error) == (status, text)


def test_a_link_is_not_registered(sharing: Server, memory: Memory) -> None:
    link = memory.path.with_name(memory.name + "_link")
    link.symlink_to(memory.path)
    try:
        reply = region_of(sharing.http, memory, key=link.name)
    finally:
        link.unlink()
    assert (reply.status, reply.error) == (500, f"Unable to open shared memory region: '{link.name}'")


@pytest.mark.parametrize(
    ("offset", "size", "text"),
    [
        (2 * HALF, 4, "Invalid offset for"),
        (2 * HALF - 4, 8, "Invalid offset + byte size for"),
        (0, 0, "Invalid offset + byte size for"),
        (4, 2**63, "Invalid offset + byte size for"),
    ],
)
def test_a_tensor_outside_of_its_region_is_refused(
    sharing: Server, memory: Memory, offset: int, size: int, text: str
) -> None:
    assert region_of(sharing.http, memory, size=2 * HALF).status == 200
    place = {"shared_memory_region": "r", "shared_memory_offset": offset, "shared_memory_byte_size": size}
    item = {"name": "INPUT", "datatype": "FP32", "shape": [1], "parameters": place}
    given = {"name": "INPUT", "datatype": "FP32", "shape": [1], "data": [1]}
    try:
        for body in (
            {"inputs": [item]},
            {"inputs": [given], "outputs": [{"name": "OUTPUT", "parameters": place}]},
        ):
            reply = post(sharing.http, "/v2/models/identity_fp32/infer", body)
            assert (reply.status, reply.error) == (400, f"{text} shared memory region: 'r'")
    finally:
        unregister_all(sharing)


def test_every_response_of_a_stream_goes_to_the_region(sharing: Server, memory: Memory) -> None:
    assert region_of(sharing.http, memory, size=2 * HALF).status == 200
    memory.map[:8] = np.array([7, 8], np.int32).tobytes()
    message = pb.ModelInferRequest(model_name="repeat")
    tensor, output = message.inputs.add(name="IN", datatype="INT32", shape=[2]), message.outputs.add(name="OUT")
    for parameters, offset, size in ((tensor.parameters, 0, 8), (output.parameters, 64, 4)):
        parameters["shared_memory_region"].string_param = "r"
        parameters["shared_memory_offset"].int64_param = offset
        parameters["shared_memory_byte_size"].int64_param = size
    try:
        outcome = call(sharing.grpc, Call("ModelStreamInfer", [message]))
    finally:
        unregister_all(sharing)
    responses = [one.infer_response for one in outcome.messages]
    assert [
        (response.outputs[0].name, list(response.raw_output_contents)) for response in responses if response.outputs
    ] == [("OUT", [b""])] * 2
    assert memory.map[64:68] == np.array([8], np.int32).tobytes()


def test_a_region_that_shrinks_under_its_requests_stops_nothing(
    sharing: Server, server_kind: str, memory: Memory
) -> None:
    if server_kind == "triton":
        pytest.skip("Triton 2.51 is killed by it")
    assert region_of(sharing.http, memory, size=2 * HALF).status == 200
    os.truncate(memory.path, HALF)
    small = {"shared_memory_region": "r", "shared_memory_offset": HALF, "shared_memory_byte_size": 4}
    large = {**small, "shared_memory_byte_size": HALF}
    item = {"name": "INPUT", "datatype": "FP32", "shape": [1], "parameters": small}
    half_item = {"name": "INPUT", "datatype": "FP32", "shape": [HALF // 4], "parameters": large}
    whole = {**half_item, "parameters": {**large, "shared_memory_offset": 0}}
    given = {"name": "INPUT", "datatype": "FP32", "shape": [1], "data": [1]}
    output = {"name": "OUTPUT"}
    try:
        for body in (
            {"inputs": [item]},
            {"inputs": [given], "outputs": [{**output, "parameters": small}]},
            {"inputs": [half_item], "outputs": [{**output, "parameters": {"classification": 1}}]},
            {"inputs": [whole], "outputs": [{**output, "parameters": large}]},
        ):
            reply = post(sharing.http, "/v2/models/identity_fp32/infer", body)
            assert reply.error == "shared memory region 'r' has become smaller than when it was registered"
        assert post(sharing.http, "/v2/models/identity_fp32/infer", {"inputs": [given]}).status == 200
    finally:
        unregister_all(sharing)
