"""Routes of retrieval: the model of a request, the form of errors, and the ends of requests."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from conch.config.pbtxt import parse
from conch.core.errors import QUEUE_FULL, Code, ConchError, internal, invalid, not_found, unavailable
from conch.core.inference import InferRequest, InferResponse, ModelSignature
from conch.core.tensors import WireTensor, split_bytes
from conch.frontends.budget import ByteBudget
from conch.frontends.http.exchange import HttpExchange
from conch.frontends.http.routes import Router
from conch.frontends.loop_budget import YieldingLister
from conch.frontends.offloading.offloader import LARGE_BYTES, Offloader
from conch.options.settings import Settings
from conch.options.triton_values import Restriction
from conch.server.execution.executor import Executor
from conch.server.model import Model
from conch.telemetry.statistics import ModelStatistics
from conch.telemetry.tracing.tracing import Tracing
from conch.telemetry.tracing.values import TraceValues
from tests.events import until
from tests.unit.frontends.http.site import WrittenConnection
from tests.unit.frontends.on_demand import LateModels

_TEXT = '{name: "text_input" data_type: TYPE_STRING dims: [1]}'
_PAIR = '{name: "text_pair" data_type: TYPE_STRING dims: [1]}'
CONFIGS = {
    "embedder": f'max_batch_size: 8 input [{_TEXT}] output [{{name: "embedding" data_type: TYPE_FP32 dims: [2]}}]',
    "ranker": f'max_batch_size: 8 input [{_TEXT}, {_PAIR}] output [{{name: "score" data_type: TYPE_FP32 dims: [1]}}]',
    "raw": 'max_batch_size: 8 input [{name: "x" data_type: TYPE_FP32 dims: [1]}] '
    'output [{name: "y" data_type: TYPE_FP32 dims: [1]}]',
}


class TextExecutor(Executor):
    """Gives numbers that follow from each text; ``error`` fails requests, ``held`` keeps them."""

    def __init__(self) -> None:
        self.error: ConchError | None = None
        self.requests: list[InferRequest] = []
        self.held = False

    def submit(self, request: InferRequest) -> None:
        self.requests.append(request)
        request.times.started = 1
        request.responded = True
        if not self.held:
            request.respond(InferResponse(error=self.error) if self.error else self.response(request))

    def response(self, request: InferRequest) -> InferResponse:
        texts = [text.decode() for text in split_bytes(list(request.inputs.values())[-1].data)]
        outputs = []
        for name in request.outputs:
            rows = [[len(text), 1] if name == "embedding" else [len(text)] for text in texts]
            array = np.array(rows, "<f4")
            outputs.append(WireTensor(name, "FP32", array.shape, array.tobytes()))
        return InferResponse(outputs)


class Site:
    """A router over models that answer at once, and its clients."""

    def __init__(self, offloader: Offloader, *names: str, **settings: Any) -> None:
        self.settings = Settings(**settings)
        self.ready = True
        self.loads_on_demand = False
        self.response_store = None
        self.tracing = Tracing(TraceValues())
        self.models: dict[str, Model] = {}
        self.executors: dict[str, TextExecutor] = {}
        for name in names:
            self.executors[name] = TextExecutor()
            config = parse(f'name: "{name}" backend: "python" {CONFIGS[name]}', "x")
            self.models[name] = Model(config, 1, self.executors[name], ModelStatistics(name, 1), {})
        self.regions: Any = None
        self.router = Router(self, offloader, YieldingLister(), openai_only=True)  # type: ignore[arg-type]
        self.connection = WrittenConnection()

    def model(self, name: str, version: int = -1) -> Model:
        if name not in self.models:
            raise not_found(f"Request for unknown model: '{name}' is not found")
        return self.models[name]

    def signatures(self) -> dict[str, ModelSignature]:
        return {name: self.models[name].signature for name in sorted(self.models)}

    def adapter_model(self, id: str) -> str | None:
        return None

    def open(self, path: str, body: Any = None, headers: dict[bytes, bytes] | None = None) -> HttpExchange:
        method = b"GET" if body is None else b"POST"
        exchange = HttpExchange(self.connection, method, path.encode(), headers or {}, True)  # type: ignore[arg-type]
        self.router.open(exchange)
        if exchange.refusal is not None:
            self.router.refuse(exchange, *exchange.refusal)
        else:
            exchange.body = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.router.handle(exchange)
        return exchange

    def ask(self, path: str, body: Any = None, headers: dict[bytes, bytes] | None = None) -> tuple[int, Any]:
        self.connection.written = b""
        self.open(path, body, headers)
        return self.answer()

    def answer(self) -> tuple[int, Any]:
        head, _, body = self.connection.written.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body) if body else None


@pytest.fixture
async def offloader() -> AsyncIterator[Offloader]:
    offloader = Offloader(1 << 30, 30, ByteBudget(1 << 30))
    yield offloader
    await offloader.close()


@pytest.fixture
async def site(offloader: Offloader) -> Site:
    return Site(offloader, "embedder", "ranker", "raw")


RERANK = {"query": "q", "documents": ["a", "ccc", "bb"]}


async def test_request_that_names_no_model_goes_to_the_only_one_of_its_kind(site: Site) -> None:
    assert site.ask("/embed", {"inputs": "abc", "normalize": False}) == (200, [[3, 1]])
    status, answer = site.ask("/rerank", RERANK)
    assert (status, [result["index"] for result in answer["results"]]) == (200, [1, 2, 0])
    assert answer["model"] == "ranker"


async def test_two_models_of_a_kind_must_be_named(offloader: Offloader) -> None:
    site = Site(offloader, "embedder", "ranker")
    site.models["other"] = site.models["embedder"]
    status, answer = site.ask("/embed", {"inputs": "abc"})
    assert status == 422
    assert answer["error"] == ("several models can serve this request: name one of 'embedder', 'other' in 'model'")
    assert site.ask("/embed", {"inputs": "abc", "model": "embedder"})[0] == 200
    assert site.ask("/v2/models/embedder/embed", {"inputs": "abc"})[0] == 200


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank_has_all_paths_of_cohere_and_jina(site: Site, path: str) -> None:
    status, answer = site.ask(path, {**RERANK, "model": "ranker", "top_n": 1})
    assert (status, answer["results"][0]["index"]) == (200, 1)


async def test_body_shows_whose_client_asks_at_a_shared_path(site: Site) -> None:
    assert site.ask("/rerank", {"query": "q", "texts": ["a", "bb"]}) == (
        200, [{"index": 1, "score": 2}, {"index": 0, "score": 1}],
    )  # fmt: skip
    status, answer = site.ask("/rerank", {"query": "q", "texts": []})
    assert (status, answer["error_type"]) == (400, "Empty")
    status, answer = site.ask("/rerank", {"query": "q", "documents": []})
    assert (status, answer) == (400, {"message": "'documents' must not be empty"})


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/v1/embeddings", {"model": "ranker", "input": "a"}, 400, "/rerank"),
        ("/v1/embeddings", {"model": "raw", "input": "a"}, 400, "/v2/models/raw/infer"),
        ("/v2/embed", {"model": "ranker", "texts": ["a"]}, 400, "/rerank"),
        ("/embed", {"model": "ranker", "inputs": "a"}, 424, "/rerank"),
        ("/v2/models/embedder/rerank", {"query": "q", "texts": ["a"]}, 424, "/embed"),
        ("/predict", {"inputs": "a"}, 424, "no model of this server classifies texts"),
        ("/classify", {"input": "a"}, 400, "no model of this server classifies texts"),
    ],
)
async def test_model_that_cannot_serve_a_route_is_refused_with_the_route_that_can(
    site: Site, path: str, body: Any, status: int, error: str
) -> None:
    code, answer = site.ask(path, body)
    assert (code, error in json.dumps(answer)) == (status, True)


@pytest.mark.parametrize(
    ("error", "kind", "tei", "others"),
    [
        (invalid("the text is too long"), "Validation", 413, 400),
        (invalid("the text cannot be tokenised: x"), "Tokenizer", 422, 400),
        (internal("broken"), "Backend", 424, 500),
        (unavailable("unloading"), "Unhealthy", 503, 503),
        (unavailable(f"[request id: x] {QUEUE_FULL}"), "Overloaded", 429, 503),
    ],
)
async def test_failure_of_the_model_has_the_form_of_each_api(
    site: Site, error: ConchError, kind: str, tei: int, others: int
) -> None:
    for executor in site.executors.values():
        executor.error = error
    assert site.ask("/embed", {"inputs": "a"}) == (tei, {"error": error.message, "error_type": kind})
    assert site.ask("/v2/embed", {"texts": ["a"]}) == (others, {"message": error.message})
    status, answer = site.ask("/v1/embeddings", {"model": "embedder", "input": "a"})
    assert (status, answer["error"]["message"]) == (others, error.message)


@pytest.mark.parametrize(
    ("path", "body", "model", "member"),
    [
        ("/embed", {"inputs": "a"}, "embedder", "inputs"),
        ("/rerank", {"query": "q", "texts": ["a"]}, "ranker", "query"),
        ("/rerank", {"query": "q", "documents": ["a"]}, "ranker", "query"),
        ("/score", {"text_1": "a", "text_2": "b", "model": "ranker"}, "ranker", "text_1"),
        ("/v1/embeddings", {"model": "embedder", "input": "a"}, "embedder", "input"),
        ("/v2/embed", {"texts": ["a"]}, "embedder", "texts"),
        ("/pooling", {"input": "a", "model": "embedder"}, "embedder", "input"),
    ],
)
async def test_error_of_the_model_names_the_member_of_the_client(
    site: Site, path: str, body: Any, model: str, member: str
) -> None:
    site.executors[model].error = invalid("input 'text_input' has 600 tokens in row 0; the model takes at most 64")
    assert f"'{member}' has 600 tokens in row 0; the model takes at most 64" in json.dumps(site.ask(path, body))


async def test_error_of_the_model_has_the_row_of_the_client(site: Site) -> None:
    refusal = invalid("input 'text_pair' has no tokens in row 3; the model needs at least one")
    site.executors["ranker"].held = True
    site.open("/rerank", {"query": "q", "texts": ["a"] * 20})
    _, _, third = site.executors["ranker"].requests
    third.respond(InferResponse(error=refusal))
    assert site.answer() == (
        413,
        {
            "error": "'texts' has no tokens in row 19; the model needs at least one",
            "error_type": "Validation",
        },
    )


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("/embed", {"error", "error_type"}),
        ("/v2/embed", {"message"}),
        ("/rerank", {"message"}),
        ("/score", {"error"}),
        ("/v2/models/m/predict", {"error", "error_type"}),
    ],
)
async def test_body_that_is_no_json_is_refused_in_the_form_of_the_path(site: Site, path: str, keys: set[str]) -> None:
    for body in (b"{", b"[]", b'{"inputs": "\\ud800"}', b'{"model": 1}'):
        status, answer = site.ask(path, body)
        assert 400 <= status < 500 and set(answer) == keys


@pytest.mark.parametrize(
    ("encoding", "body", "tei", "code"),
    [
        (b"gzip", b"no gzip", 400, "undecodable_body"),
        (b"gzip", gzip.compress(b"{}")[:-4], 400, "undecodable_body"),
        (b"gzip", b"", 400, "undecodable_body"),
        (b"br", b"{}", 415, "unsupported_content_encoding"),
    ],
)
async def test_body_that_cannot_be_decompressed_is_refused_in_each_form(
    site: Site, encoding: bytes, body: bytes, tei: int, code: str
) -> None:
    headers = {b"content-encoding": encoding}
    status, answer = site.ask("/embed", body, headers)
    assert (status, answer["error_type"]) == (tei, "Validation")
    assert (b"Accept-Encoding: gzip, deflate\r\n" in site.connection.written) is (tei == 415)
    status, answer = site.ask("/v1/embeddings", body, headers)
    assert (status, answer["error"]["code"]) == (400, code)


async def test_unknown_model_is_not_found_in_each_form(site: Site) -> None:
    for path, body in (("/embed", {"inputs": "a"}), ("/v2/embed", {"texts": ["a"]}), ("/score", {"text_1": "a"})):
        assert site.ask(path, {**body, "model": "nobody"})[0] == 404
    assert site.ask("/v2/models/nobody/embed", {"inputs": "a"})[1]["error_type"] == "Validation"


async def test_restricted_api_refuses_in_the_form_of_the_client(offloader: Offloader) -> None:
    rule = Restriction(frozenset({"inference"}), "authorization", "Bearer key")
    site = Site(offloader, "embedder", http_restricted_api=(rule,))
    for path, body, keys in (("/embed", {"inputs": "a"}, {"error", "error_type"}), ("/v2/embed", {}, {"message"})):
        status, answer = site.ask(path, body)
        assert (status, set(answer)) == (401, keys)
    assert site.ask("/embed", {"inputs": "a"}, {b"authorization": b"Bearer key"})[0] == 200


async def test_client_that_disconnects_cancels_all_its_requests(site: Site) -> None:
    executor = site.executors["embedder"]
    executor.held = True
    exchange = site.open("/v1/embeddings", {"model": "embedder", "input": ["a"] * 20})
    assert len(executor.requests) == 3
    exchange.disconnect()
    assert all(request.cancelled for request in executor.requests)


async def test_first_failed_request_ends_the_exchange(site: Site) -> None:
    executor = site.executors["embedder"]
    executor.held = True
    site.connection.written = b""
    site.open("/v1/embeddings", {"model": "embedder", "input": ["a"] * 20})
    executor.requests[1].respond(InferResponse(error=ConchError("broken", Code.INTERNAL)))
    assert site.answer()[0] == 500
    assert executor.requests[0].cancelled and executor.requests[2].cancelled


async def test_request_id_goes_to_the_model_and_back(site: Site) -> None:
    assert site.ask("/embed", {"inputs": "a"}, {b"x-request-id": b"abc"})[0] == 200
    assert b"X-Request-Id: abc\r\n" in site.connection.written
    assert site.executors["embedder"].requests[0].id == "abc"


async def test_large_body_is_decoded_in_a_process(site: Site) -> None:
    exchange = site.open("/embed", {"inputs": "x" * (LARGE_BYTES + 1)})
    while not exchange.gone:
        await asyncio.sleep(0.01)
    assert site.answer()[0] == 200


async def test_request_waits_for_its_model_and_keeps_the_form_of_its_errors(site: Site) -> None:
    late = LateModels(site.model)
    late.missing = {"embedder"}
    site.model, site.loads_on_demand = late.model, True  # type: ignore[method-assign]
    for body, status in ({"inputs": "abc"}, 200), ({"inputs": "abc", "dimensions": 9}, 422):
        late.missing = {"embedder"}
        site.connection.written = b""
        exchange = site.open("/v2/models/embedder/embed", body)
        await until(lambda: late.waiting)
        late.load("embedder")
        await until(lambda: exchange.gone)  # noqa: B023
        assert site.answer()[0] == status
    late.missing = {"embedder"}
    site.connection.written = b""
    exchange = site.open("/v2/models/embedder/embed", {"inputs": "abc"})
    await until(lambda: late.waiting)
    late.load("embedder", unavailable("the load failed"))
    await until(lambda: exchange.gone)
    assert site.answer() == (503, {"error": "the load failed", "error_type": "Unhealthy"})


async def test_info_and_health_are_those_of_tei(site: Site) -> None:
    assert site.ask("/v2/models/ranker/info")[1]["model_type"] == {"reranker": {}}
    assert site.ask("/info")[0] == 422
    assert site.ask("/health") == (200, None)
    site.ready = False
    assert site.ask("/health")[0] == 503
    assert site.ask("/predict", {"inputs": "a"})[0] == 503
