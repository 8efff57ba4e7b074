"""Models that are unloaded or replaced while a large request to them is being decoded."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from conch.config.pbtxt import parse
from conch.core.inference import InferRequest, InferResponse
from conch.core.tensors import WireTensor, pack_bytes
from conch.frontends.budget import ByteBudget
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.routes import Router
from conch.frontends.loop_budget import YieldingLister
from conch.frontends.offloading.offloader import LARGE_BYTES, Offloader
from conch.options.settings import Settings
from conch.server.execution.executor import Executor
from conch.server.model import Model
from conch.server.models.memory import MemoryLedger
from conch.server.models.states import ModelState, ModelTable, State, VersionState
from conch.server.models.versions import ServingVersions
from conch.server.regions import ClientRegions
from conch.telemetry.metrics import Registry
from conch.telemetry.statistics import ModelStatistics
from conch.telemetry.tracing.tracing import Tracing
from conch.telemetry.tracing.values import TraceValues

CONFIG = """
name: "m" backend: "python" max_batch_size: 0
input [
  {name: "text_input" data_type: TYPE_STRING dims: [1] optional: true},
  {name: "messages" data_type: TYPE_STRING dims: [1] optional: true}
]
output [
  {name: "text_output" data_type: TYPE_STRING dims: [1]},
  {name: "embedding" data_type: TYPE_FP32 dims: [2]}
]
"""
#: Another model under the same name: what was decoded for the one above does not fit it.
OTHER = """
name: "m" backend: "python" max_batch_size: 0
input [{name: "text_input" data_type: TYPE_FP32 dims: [3]}]
output [{name: "score" data_type: TYPE_FP32 dims: [1]}]
model_transaction_policy {decoupled: true}
"""
LARGE = "x" * (LARGE_BYTES + 1)


class LabelExecutor(Executor):
    """Answers every request at once; ``label`` is the text, and says which load of the model it was."""

    def __init__(self, label: str) -> None:
        self.label = label

    def submit(self, request: InferRequest) -> None:
        text = WireTensor("text_output", "BYTES", (1,), pack_bytes([self.label.encode()]))
        vector = WireTensor("embedding", "FP32", (2,), np.array([1, len(self.label)], np.float32).tobytes())
        request.times.started = 1
        request.responded = True
        request.respond(InferResponse([tensor for tensor in (text, vector) if tensor.name in request.outputs]))


class Core:
    """As much of the server as the front end asks for."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.exiting = False
        self.regions = ClientRegions(False, list, ())
        self.loads_on_demand = False
        self.response_store = None
        self.tracing = Tracing(TraceValues())
        self.table = ModelTable()
        self.model = self.table.find
        registry = Registry(cpu=False, gpu=False)
        self.versions = ServingVersions(self.table, registry, MemoryLedger(self.table))

    def adapter_model(self, id: str) -> str | None:
        return None

    def load(self, label: str, version: int, config: str = CONFIG) -> Model:
        """Load a version, in place of everything that the model had."""
        known = self.table.models.setdefault("m", ModelState("m"))
        self.versions.unload_model(known)
        model = Model(parse(config, "x"), version, LabelExecutor(label), ModelStatistics("m", version), {})
        known.versions = {version: VersionState(State.READY, "", model)}
        return model


class HeldOffloader(Offloader):
    """Decodes, and returns the result when it is released; ``offloaded`` has the functions called in a process."""

    def __init__(self) -> None:
        super().__init__(1 << 30, 30, ByteBudget(1 << 30))
        self.offloaded: list[str] = []
        self.held = asyncio.Event()
        self.release = asyncio.Event()

    async def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> Any:
        result = await super().run(size, function, *arguments)
        if size > LARGE_BYTES:
            self.offloaded.append(function.__name__)
            self.held.set()
            await self.release.wait()
        return result


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))

    def get_write_buffer_size(self) -> int:
        return 0


class Client:
    """One exchange at a time with a router."""

    def __init__(self, core: Core, offloader: Offloader) -> None:
        self.budget = ByteBudget(1 << 30)
        self.router = Router(core, offloader, YieldingLister())  # type: ignore[arg-type]
        self.transport = Transport()
        self.ended = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def writelines(self, parts: list[bytes]) -> None:
        self.transport.writelines(parts)

    def on_exchange_ended(self, exchange: HttpExchange) -> None:
        self.ended.set()

    def post(self, path: str, document: dict[str, Any]) -> HttpExchange:
        exchange = HttpExchange(self, b"POST", path.encode(), {}, True)  # type: ignore[arg-type]
        exchange.body = json.dumps(document).encode()
        assert len(exchange.body) > LARGE_BYTES
        assert self.router.open(exchange) >= len(exchange.body)
        self.router.handle(exchange)
        return exchange

    async def response(self) -> tuple[int, str]:
        await asyncio.wait_for(self.ended.wait(), 30)
        head, _, body = self.transport.written.partition(b"\r\n\r\n")
        return int(head.split()[1]), body.decode()


@pytest.fixture
async def core() -> AsyncIterator[Core]:
    core = Core()
    yield core
    await core.versions.finish(5)


@pytest.fixture
async def offloader() -> AsyncIterator[HeldOffloader]:
    offloader = HeldOffloader()
    yield offloader
    await offloader.close()


INFER = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [LARGE]}]}
GENERATE = {"text_input": LARGE}
CHAT = {"model": "m", "messages": [{"role": "user", "content": LARGE}]}
COMPLETION = {"model": "m", "prompt": LARGE}
EMBEDDING = {"model": "m", "input": LARGE}

KSERVE = [("infer", INFER), ("generate", GENERATE), ("generate_stream", GENERATE)]
OPENAI = [("chat/completions", CHAT), ("completions", COMPLETION), ("embeddings", EMBEDDING)]


async def exchange_while(
    core: Core, offloader: HeldOffloader, path: str, document: dict[str, Any], change: Callable[[], Any]
) -> tuple[int, str]:
    """The status and body of the response to a request during whose decoding ``change`` happens."""
    client = Client(core, offloader)
    client.post(path, document)
    await asyncio.wait_for(offloader.held.wait(), 30)
    change()
    for _ in range(10):  # what has no requests ends within these turns of the loop
        await asyncio.sleep(0)
    offloader.release.set()
    return await client.response()


@pytest.mark.parametrize(("method", "document"), KSERVE)
async def test_version_is_unloaded_while_its_request_is_decoded(
    core: Core, offloader: HeldOffloader, method: str, document: dict
) -> None:
    first = core.load("first", 1)
    status, body = await exchange_while(
        core, offloader, f"/v2/models/m/versions/1/{method}", document, lambda: core.load("second", 2)
    )
    assert status == 200
    assert "first" in body and "second" not in body
    assert await core.versions.finish(5)
    assert first.stopping and not first.in_flight


@pytest.mark.parametrize(("method", "document"), KSERVE)
async def test_model_becomes_another_while_its_request_is_decoded(
    core: Core, offloader: HeldOffloader, method: str, document: dict
) -> None:
    core.load("first", 1)
    status, body = await exchange_while(
        core, offloader, f"/v2/models/m/{method}", document, lambda: core.load("second", 1, OTHER)
    )
    assert status == 200
    assert "first" in body


@pytest.mark.parametrize(("method", "document"), OPENAI)
async def test_model_becomes_another_while_its_openai_request_is_prepared(
    core: Core, offloader: HeldOffloader, method: str, document: dict
) -> None:
    core.load("first", 1)
    status, body = await exchange_while(
        core, offloader, f"/v1/{method}", document, lambda: core.load("second", 1, OTHER)
    )
    assert status == 200
    assert "first" in body or json.loads(body)["data"][0]["embedding"] == [1.0, 5.0]


@pytest.mark.parametrize(("method", "document"), KSERVE)
async def test_server_stops_while_a_request_is_decoded(
    core: Core, offloader: HeldOffloader, method: str, document: dict
) -> None:
    model = core.load("first", 1)

    def stop() -> None:
        core.exiting = model.stopping = True

    status, body = await exchange_while(core, offloader, f"/v2/models/m/{method}", document, stop)
    assert status == 503
    assert "Server is stopping" in body
    assert not model.in_flight


async def test_client_hangs_up_while_its_request_is_decoded(core: Core, offloader: HeldOffloader) -> None:
    model = core.load("first", 1)
    exchange = Client(core, offloader).post("/v2/models/m/infer", INFER)
    await asyncio.wait_for(offloader.held.wait(), 30)
    exchange.disconnect()
    offloader.release.set()
    assert await asyncio.wait_for(model.finish(), 30)
    assert model.statistics.success_count == 0


async def test_a_compressed_body_counts_by_what_it_becomes(core: Core, offloader: HeldOffloader) -> None:
    core.load("first", 1)
    client = Client(core, offloader)
    exchange = HttpExchange(client, b"POST", b"/v2/models/m/infer", {b"content-encoding": b"gzip"}, True)  # type: ignore[arg-type]
    exchange.body = gzip.compress(json.dumps(INFER).encode())
    assert len(exchange.body) < LARGE_BYTES // 100
    client.router.open(exchange)
    client.router.handle(exchange)
    await asyncio.wait_for(offloader.held.wait(), 30)
    offloader.release.set()
    status, body = await client.response()
    assert status == 200
    assert "first" in body


@pytest.mark.parametrize("json_size", [0, LARGE_BYTES])
async def test_strings_of_binary_tensors_are_counted_elsewhere(
    core: Core, offloader: HeldOffloader, json_size: int
) -> None:
    core.load("first", 1)
    client = Client(core, offloader)
    count = LARGE_BYTES // 4 + 1
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 4 * count}}
    head = json.dumps({"parameters": {"text": "x" * json_size}, "inputs": [tensor]}).encode()
    headers = {b"inference-header-content-length": b"%d" % len(head)}
    exchange = HttpExchange(client, b"POST", b"/v2/models/m/infer", headers, True)  # type: ignore[arg-type]
    exchange.body = head + bytes(4 * count)
    client.router.open(exchange)
    client.router.handle(exchange)
    offloader.release.set()
    status, body = await client.response()
    assert status == 400 and "unexpected number of string elements 2" in body
    assert offloader.offloaded == (["infer", "strings"] if json_size else ["strings"])


@pytest.mark.parametrize("method", ["infer", "generate", "generate_stream"])
async def test_model_is_let_go_after_a_large_request_that_cannot_be_decoded(
    core: Core, offloader: HeldOffloader, method: str
) -> None:
    model = core.load("first", 1)
    client = Client(core, offloader)
    client.post(f"/v2/models/m/{method}", {"text_input": [[LARGE], {}], "inputs": LARGE})
    status, _ = await client.response()
    assert status >= 400
    await asyncio.sleep(0)
    assert not model.in_flight
