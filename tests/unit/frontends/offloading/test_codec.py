"""Large requests and answers in another process: as they would be in this one, and bounded."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
from array import array
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from conch.core.errors import Code, ConchError, not_found, unavailable
from conch.core.inference import InferRequest, InferResponse, ModelSignature, TensorSpec
from conch.core.tensors import WireTensor, pack_bytes
from conch.frontends.budget import ByteBudget
from conch.frontends.offloading import answers, requests
from conch.frontends.offloading.pool import Codec, CodecProcess, OpenAiResponse
from conch.machine.memory import children_of
from conch.wire.json.control import read_load
from conch.wire.json.generate import Layout, encode_generate
from conch.wire.json.infer import JsonOutputPlan, RequestedOutput, decode_infer, encode_infer
from conch.wire.openai.endpoints import ENDPOINTS
from conch.wire.openai.reading import ApiError, Fields
from conch.wire.regions import Regions

LIMIT = 64 << 20
NUMBERS = TensorSpec("numbers", "FP32", (-1,))
TEXTS = TensorSpec("texts", "BYTES", (-1,), optional=True)
MODEL = ModelSignature("m", 3, 4, {"numbers": NUMBERS, "texts": TEXTS}, {"numbers": NUMBERS})
LANGUAGE = ModelSignature(
    "l",
    1,
    0,
    {
        name: TensorSpec(name, "BYTES", (1,), optional=True)
        for name in ("text_input", "messages", "sampling_parameters")
    },
    {"text_output": TensorSpec("text_output", "BYTES", (1,)), "embedding": TensorSpec("embedding", "FP32", (2,))},
    by_row=True,
)
INFER: dict[str, Any] = {
    "id": "an id",
    "parameters": {"sequence_id": 2**64 - 1, "priority": 3, "timeout": 4, "text": "ä", "number": 0.5},
    "inputs": [
        {"name": "numbers", "datatype": "FP32", "shape": [1, 3], "data": [[1, 2.5, -3]]},
        {"name": "texts", "datatype": "BYTES", "shape": [1, 2], "data": ["", "ä"]},
    ],
    "outputs": [{"name": "numbers", "parameters": {"classification": 2}}],
}  # fmt: skip


class RecordedProcess(CodecProcess):
    """A process with the sizes of the work that it was given."""

    def __init__(self, threads: Executor, on_exit: Callable[[CodecProcess], None]) -> None:
        super().__init__(threads, on_exit)
        self.sizes: list[int] = []

    async def perform(
        self, header: dict[str, Any], parts: list[Any], answer: OpenAiResponse | None
    ) -> tuple[dict[str, Any], memoryview]:
        self.sizes.append(sum(map(len, parts)))
        return await super().perform(header, parts, answer)


@pytest.fixture
async def codec() -> AsyncIterator[Codec]:
    codec = Codec(1 << 30, 30, ByteBudget(1 << 30))
    yield codec
    await codec.close()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[RecordedProcess]:
    """The processes that codecs start."""
    processes: list[RecordedProcess] = []

    def start(threads: Executor, on_exit: Callable[[CodecProcess], None]) -> RecordedProcess:
        processes.append(RecordedProcess(threads, on_exit))
        return processes[-1]

    monkeypatch.setattr("conch.frontends.offloading.pool.CodecProcess", start)
    return processes


async def begun(processes: list[RecordedProcess]) -> RecordedProcess:
    """The first process, as soon as there is one."""
    while not processes:
        await asyncio.sleep(0)
    return processes[0]


def ignore(response: InferResponse) -> None:
    raise AssertionError(response)


def shown(request: InferRequest) -> dict[str, Any]:
    kept = (
        "id",
        "outputs",
        "parameters",
        "correlation_id",
        "flags",
        "priority",
        "timeout",
        "model_name",
        "model_version",
    )
    inputs = [(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) for tensor in request.inputs.values()]
    return {"inputs": inputs, **{name: getattr(request, name) for name in kept}}


async def refusal(decoding: Any) -> ConchError:
    with pytest.raises(ConchError) as caught:
        await decoding
    return caught.value


@pytest.mark.parametrize("encoding", ["", "gzip"])
async def test_a_request_is_what_the_server_would_have_read(codec: Codec, encoding: str) -> None:
    body = json.dumps(INFER).encode()
    expected, plan = decode_infer(body, None, MODEL, ignore)
    sent = gzip.compress(body) if encoding else body
    request, read = await requests.decode_infer(codec, sent, MODEL, ignore, encoding=encoding, limit=LIMIT)
    assert shown(request) == shown(expected)
    assert read == plan
    assert request.inputs["texts"].elements == 2  # nobody counts them again


async def test_tensors_behind_the_json_are_not_sent(codec: Codec) -> None:
    tensor = {"name": "numbers", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    texts = {"name": "texts", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 5}}
    document = json.dumps({"inputs": [texts, tensor]}).encode()
    body = document + pack_bytes([b"x"]) + array("f", [1, 2]).tobytes()
    expected, _ = decode_infer(body, len(document), MODEL, ignore)
    request, _ = await requests.decode_json(codec, body, len(document), MODEL, ignore, limit=LIMIT)
    assert shown(request) == shown(expected)
    assert request.inputs["numbers"].data.obj is body  # type: ignore[union-attr]


async def test_what_the_model_does_not_accept_is_refused_as_the_server_would(codec: Codec) -> None:
    body = json.dumps({"inputs": [{"name": "other", "datatype": "FP32", "shape": [1], "data": [1]}]}).encode()
    error = await refusal(requests.decode_infer(codec, body, MODEL, ignore, limit=LIMIT))
    assert (error.code, error.message) == (Code.INVALID_ARG, "unexpected inference input 'other' for model 'm'")
    error = await refusal(requests.decode_infer(codec, b"{]", MODEL, ignore, limit=LIMIT))
    assert error.code is Code.INTERNAL and "Missing a name for object member" in error.message


async def test_parameters_that_would_keep_the_server_busy_are_refused(codec: Codec) -> None:
    body = json.dumps({**INFER, "parameters": {str(index): index for index in range(20_000)}}).encode()
    error = await refusal(requests.decode_infer(codec, body, MODEL, ignore, limit=LIMIT))
    assert error.code is Code.INVALID_ARG and "20000 parameters; at most 10000" in error.message


async def test_a_message_does_not_repeat_all_that_the_client_sent(codec: Codec) -> None:
    body = json.dumps({"inputs": [{"name": "x" * 1_000_000, "datatype": "FP32", "shape": [1], "data": [1]}]}).encode()
    error = await refusal(requests.decode_infer(codec, body, MODEL, ignore, limit=LIMIT))
    assert len(error.message) < 20_000 and "1000" in error.message


async def test_texts_of_generate_become_requests(codec: Codec) -> None:
    body = json.dumps({"text_input": ["a", "b"], "messages": "c"}).encode()
    several, layout = await requests.decode_generate(
        codec, body, LANGUAGE, lambda index: ignore, texts=True, limit=LIMIT
    )
    assert layout is None
    assert [bytes(one.inputs["text_input"].data)[4:] for one in several] == [b"a", b"b"]
    [single], layout = await requests.decode_generate(
        codec, b'{"text_input": "a", "top_k": 1}', LANGUAGE, lambda index: ignore, texts=True, limit=LIMIT
    )
    assert layout is Layout.FLAT and single.parameters == {"top_k": 1}


@pytest.mark.parametrize(
    ("endpoint", "members"),
    [
        ("chat", {"messages": [{"role": "user", "content": "ä"}], "max_tokens": 5, "n": 2, "logprobs": False}),
        ("completion", {"prompt": ["a", "b"], "echo": True, "stream": True}),
        ("embedding", {"input": ["a", "b", "c"], "encoding_format": "base64"}),
    ],
)
async def test_openai_requests_are_what_the_server_would_have_read(codec: Codec, endpoint: str, members: dict) -> None:
    expected = ENDPOINTS[endpoint].read(Fields(members))
    body = json.dumps({"model": "l", **members}).encode()
    plan, inputs = await requests.decode_openai(
        codec, body, endpoint, lambda name: LANGUAGE, encoding="identity", limit=LIMIT
    )
    assert plan == expected.plan
    wanted = expected.inputs(LANGUAGE)
    assert [{name: bytes(one.data) for name, one in part.items()} for part in inputs] == [
        {name: bytes(one.data) for name, one in part.items()} for part in wanted
    ]


async def test_the_tools_of_a_chat_are_found_in_its_answer(codec: Codec) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("b", "a")]
    body = {"model": "l", "messages": [{"role": "user", "content": ""}], "tools": tools}
    model = ModelSignature(
        "l", 1, 0, {**LANGUAGE.inputs, "tools": TensorSpec("tools", "BYTES", (1,))}, LANGUAGE.outputs
    )
    plan, _ = await requests.decode_openai(
        codec, json.dumps(body).encode(), "chat", lambda name: model, encoding="", limit=LIMIT
    )
    assert plan.tools.names == {"a", "b"} and plan.tools.mode == "auto"  # type: ignore[union-attr]


async def test_an_openai_error_names_its_member(codec: Codec) -> None:
    body = b'{"model": "l", "messages": [{"role": "nobody"}]}'
    error = await refusal(requests.decode_openai(codec, body, "chat", lambda name: LANGUAGE, encoding="", limit=LIMIT))
    assert isinstance(error, ApiError) and error.param == "messages[0].role"


async def test_a_model_that_is_missing_refuses_the_request_and_the_process_goes_on(codec: Codec) -> None:
    def missing(name: str) -> ModelSignature:
        raise not_found(f"no {name}")

    for _ in range(2):
        error = await refusal(
            requests.decode_openai(codec, b'{"model": "x"}', "chat", missing, encoding="", limit=LIMIT)
        )
        assert (error.code, error.message) == (Code.NOT_FOUND, "no x")
    error = await refusal(requests.decode_infer(codec, b"{}", MODEL, ignore, limit=LIMIT))
    assert "inputs" in error.message


@pytest.mark.parametrize("missing", [True, False])
async def test_a_process_that_got_no_answer_to_its_question_is_not_given_other_work(
    codec: Codec, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    def signature_of(name: str) -> ModelSignature:
        monkeypatch.setattr("conch.frontends.offloading.pool.SharedMessage", no_memory)
        if missing:
            raise not_found(f"no {name}")
        return LANGUAGE

    def no_memory(*_: object) -> None:
        monkeypatch.undo()
        raise unavailable("there is no memory")

    error = await refusal(
        requests.decode_openai(codec, b'{"model": "x"}', "chat", signature_of, encoding="", limit=LIMIT)
    )
    assert "try again" in error.message
    request, _ = await requests.decode_infer(codec, json.dumps(INFER).encode(), MODEL, ignore, limit=LIMIT)
    assert request.id == "an id"


async def test_a_load_brings_its_configuration_and_files(codec: Codec) -> None:
    body = b'{"parameters": {"config": "\xc3\xa4", "file:1/a": "YWI=", "file:1/b": ""}}'
    assert await requests.decode_load(codec, body) == read_load(body)
    assert await requests.decode_load(codec, b"{}") == read_load(b"{}")


def answer() -> tuple[InferRequest, InferResponse]:
    request = InferRequest("m", {}, ignore, model_version=3, id="an id")
    numbers = WireTensor("numbers", "FP32", (1, 3), array("f", [1, float("nan"), -3]).tobytes())
    texts = WireTensor("texts", "BYTES", (1, 2), pack_bytes([b"a", "ä".encode()]))
    return request, InferResponse([numbers, texts], parameters={"n": float("inf")})


class Labelled:
    def labels(self, name: str) -> list[str]:
        return ["one", "two", "three"]


@pytest.mark.parametrize(
    "plan",
    [
        JsonOutputPlan(),
        JsonOutputPlan(binary=True),
        JsonOutputPlan(batched=True, outputs={"numbers": RequestedOutput(False, 2), "texts": RequestedOutput(True)}),
    ],
)
async def test_an_answer_is_what_the_server_would_have_written(codec: Codec, plan: JsonOutputPlan) -> None:
    request, response = answer()
    model: Any = Labelled()
    document, blobs = encode_infer(request, response, plan, model.labels)
    size, parts = await answers.encode_infer(codec, request, response, plan, model, "identity")
    assert b"".join(parts) == b"".join([document, *blobs])
    assert size == (len(document) if blobs else 0)
    _, parts = await answers.encode_infer(codec, request, response, plan, model, "gzip")
    assert gzip.decompress(b"".join(parts)) == b"".join([document, *blobs])


async def test_an_answer_of_generate_is_what_the_server_would_have_written(codec: Codec) -> None:
    request, response = answer()
    parts = await answers.encode_generate(codec, request, response, Layout.ROW)
    assert b"".join(parts) == encode_generate(request, response, Layout.ROW)


async def test_what_takes_too_long_is_refused_and_the_next_is_served() -> None:
    codec = Codec(1 << 30, 0.1, ByteBudget(1 << 30), wall_seconds=60)
    error = await refusal(requests.decode_infer(codec, b"[" + b"{}," * 2_000_000 + b"{}]", MODEL, ignore, limit=LIMIT))
    assert error.code is Code.INVALID_ARG and "--codec-timeout-secs" in error.message
    codec.seconds = 30
    request, _ = await requests.decode_infer(codec, json.dumps(INFER).encode(), MODEL, ignore, limit=LIMIT)
    assert request.id == "an id"
    await codec.close()


async def test_work_that_gets_no_processor_time_is_to_be_tried_again(codec: Codec) -> None:
    body = json.dumps(INFER).encode()
    before = set(children_of(os.getpid()))
    await requests.decode_infer(codec, body, MODEL, ignore, limit=LIMIT)
    (process,) = set(children_of(os.getpid())) - before
    os.kill(process, signal.SIGSTOP)
    codec.wall_seconds = 0.01
    error = await refusal(requests.decode_infer(codec, body, MODEL, ignore, limit=LIMIT))
    assert error.code is Code.UNAVAILABLE and error.message.startswith("the server is busy: ")


async def test_what_takes_too_much_memory_is_refused() -> None:
    codec = Codec(1 << 20, 30, ByteBudget(1 << 30))  # less than a process has when it has been started
    error = await refusal(requests.decode_infer(codec, b"[" + b"{}," * 2_000_000 + b"{}]", MODEL, ignore, limit=LIMIT))
    assert error.code is Code.INVALID_ARG and "--codec-memory" in error.message
    await codec.close()


async def test_a_process_that_dies_fails_what_it_did_alone(codec: Codec, processes: list[RecordedProcess]) -> None:
    slow = asyncio.ensure_future(
        requests.decode_infer(codec, b"[" + b"{}," * 5_000_000 + b"{}]", MODEL, ignore, limit=LIMIT)
    )
    os.kill((await begun(processes)).pid, signal.SIGKILL)
    assert (await refusal(slow)).code is Code.INTERNAL
    request, _ = await requests.decode_infer(codec, json.dumps(INFER).encode(), MODEL, ignore, limit=LIMIT)
    assert request.id == "an id"


async def test_work_that_nobody_waits_for_is_not_begun(codec: Codec, processes: list[RecordedProcess]) -> None:
    body = b"[" + b"{}," * 2_000_000 + b"{}]"
    size = len(body)
    running = [asyncio.ensure_future(codec.run({"work": "load"}, [body])) for _ in range(2)]
    waiting = asyncio.ensure_future(codec.run({"work": "load"}, [b"{}"], size=100 << 20))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, *running, return_exceptions=True)
    await asyncio.gather(codec.run({"work": "load"}, [b"{ }"]), return_exceptions=True)
    assert sorted(size for process in processes for size in process.sizes) == [3, size, size]


async def test_work_that_its_client_gave_up_does_not_keep_the_process(
    codec: Codec, processes: list[RecordedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conch.frontends.offloading.pool.GRACE_SECONDS", 0.0)
    slow = asyncio.ensure_future(codec.run({"work": "load"}, [b"[" + b"{}," * 5_000_000 + b"{}]"]))
    process = await begun(processes)
    slow.cancel()
    await process.ended.wait()
    assert await requests.decode_load(codec, b"{}") == read_load(b"{}")


async def test_a_small_body_does_not_wait_for_giants(codec: Codec) -> None:
    giant = b"[" + b"{}," * 4_000_000 + b"{}]"
    giants = [asyncio.ensure_future(codec.run({"work": "load"}, [giant])) for _ in range(3)]
    await asyncio.sleep(0)
    assert await requests.decode_load(codec, b"{}") == read_load(b"{}")
    assert not any(one.done() for one in giants[1:])
    for one in giants:
        one.cancel()
    await asyncio.gather(*giants, return_exceptions=True)


async def test_a_server_that_stops_ends_what_is_under_way() -> None:
    codec = Codec(1 << 30, 30, ByteBudget(1 << 30))
    body = b"[" + b"{}," * 5_000_000 + b"{}]"
    in_flight = [asyncio.ensure_future(refusal(codec.run({"work": "load"}, [body]))) for _ in range(3)]
    await asyncio.sleep(0)
    await codec.close()
    errors = await asyncio.gather(*in_flight)
    assert errors[-1].code is Code.UNAVAILABLE
    assert (await refusal(codec.run({"work": "load"}, [b"{}"]))).code is Code.UNAVAILABLE


async def test_results_are_counted_while_somebody_has_them() -> None:
    budget = ByteBudget(1 << 30)
    codec = Codec(1 << 30, 30, budget)
    request, _ = await requests.decode_infer(codec, json.dumps(INFER).encode(), MODEL, ignore, limit=LIMIT)
    assert budget.used == 12 + 10
    texts = request.inputs["texts"]
    del request
    await asyncio.sleep(0)
    assert budget.used == 12 + 10
    del texts
    assert budget.used == 0
    await codec.close()
    budget.size = 21
    error = await refusal(requests.decode_infer(codec, json.dumps(INFER).encode(), MODEL, ignore, limit=LIMIT))
    assert error.code is Code.UNAVAILABLE and budget.used == 0


def grpc_request(*inputs: dict[str, Any], raw: tuple[bytes, ...] = ()) -> service_pb2.ModelInferRequest:
    return service_pb2.ModelInferRequest(model_name="m", id="an id", inputs=inputs, raw_input_contents=raw)


async def decoded_grpc(
    codec: Codec, message: service_pb2.ModelInferRequest
) -> tuple[service_pb2.ModelInferRequest, list[bytes], list[int | None]]:
    rest, raw, elements = await requests.decode_grpc(codec, message.SerializeToString())
    return service_pb2.ModelInferRequest.FromString(bytes(rest)), list(map(bytes, raw)), elements


async def test_values_in_a_grpc_message_become_bytes(codec: Codec) -> None:
    numbers = {"name": "n", "datatype": "FP32", "shape": [2], "contents": {"fp32_contents": [1, 2]}}
    texts = {"name": "t", "datatype": "BYTES", "shape": [2], "contents": {"bytes_contents": [b"a", b""]}}
    message, raw, elements = await decoded_grpc(codec, grpc_request(numbers, texts))
    assert raw == [array("f", [1, 2]).tobytes(), pack_bytes([b"a", b""])]
    assert elements == [None, 2]
    assert message.id == "an id" and not any(tensor.HasField("contents") for tensor in message.inputs)


async def test_raw_texts_of_a_grpc_message_are_counted_if_they_are_well_formed(codec: Codec) -> None:
    texts = {"name": "t", "datatype": "BYTES", "shape": [2]}
    data = pack_bytes([b"a", b""])
    assert (await decoded_grpc(codec, grpc_request(texts, raw=(data,))))[1:] == ([data], [2])
    for broken in (data[:-1], data[:5] + b"\x01\0\0\0"):
        assert (await decoded_grpc(codec, grpc_request(texts, raw=(broken,))))[1:] == ([broken], [None])


async def test_what_is_wrong_with_a_grpc_message_is_left_to_be_told(codec: Codec) -> None:
    both = {"name": "b", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": [1]}}
    nothing = {"name": "n", "datatype": "FP32", "shape": [1]}
    message, raw, _ = await decoded_grpc(codec, grpc_request(both, raw=(b"abcd",)))
    assert raw == [b"abcd"] and message.inputs[0].HasField("contents")
    message, raw, _ = await decoded_grpc(codec, grpc_request(both, nothing, both))
    assert len(raw) == 1 and not message.inputs[1].HasField("contents")
    error = await refusal(requests.decode_grpc(codec, b"\xff"))
    assert (error.code, error.message) == (Code.INTERNAL, "Unable to parse request")
    wrong = {"name": "b", "datatype": "FP32", "shape": [1], "contents": {"bool_contents": [True]}}
    assert "expected datatype 'FP32'" in (await refusal(decoded_grpc(codec, grpc_request(wrong)))).message
    many = grpc_request(*[nothing] * 60_000)
    assert "besides its tensors" in (await refusal(decoded_grpc(codec, many))).message


class _Regions(Regions):
    """Regions that have everything: ``placed`` are the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.placed: dict[str, tuple[str, int, int]] = {}

    def read(self, datatype: str, name: str, offset: int, size: int) -> bytes:
        return f"{datatype} {name} {offset} {size} ".encode()

    def place(self, output: str, name: str, offset: int, size: int) -> None:
        self.placed[output] = name, offset, size


async def test_tensors_in_shared_memory_are_resolved_by_the_server(codec: Codec) -> None:
    place = {"shared_memory_region": "r", "shared_memory_offset": 8, "shared_memory_byte_size": 12}
    numbers = {"name": "numbers", "datatype": "FP32", "shape": [1, 3], "parameters": place}
    outputs = [{"name": "numbers", "parameters": place}]
    body = json.dumps({**INFER, "inputs": [numbers, INFER["inputs"][1]], "outputs": outputs}).encode()
    for size in (None, len(body)):
        regions = _Regions()
        if size is None:
            request, plan = await requests.decode_infer(codec, body, MODEL, ignore, limit=LIMIT, regions=regions)
        else:
            request, plan = await requests.decode_json(codec, body, size, MODEL, ignore, limit=LIMIT, regions=regions)
        assert bytes(request.inputs["numbers"].data) == b"FP32 r 8 12 "
        assert bytes(request.inputs["texts"].data) == pack_bytes([b"", "ä".encode()])
        assert regions.placed == {"numbers": ("r", 8, 12)}
        assert request.shared is regions
        assert plan.outputs == {"numbers": RequestedOutput(False)}
    error = await refusal(requests.decode_infer(codec, body, MODEL, ignore, limit=LIMIT))
    assert (error.code, error.message) == (Code.NOT_FOUND, "Unable to find shared memory region: 'r'")
