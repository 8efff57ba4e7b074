"""Large requests and responses in another process: as they would be in this one, and limited."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2

from conch.core.errors import Code, ConchError, invalid, not_found, unavailable
from conch.core.inference import InferRequest, InferResponse, ModelSignature, TensorSpec
from conch.core.tensors import WireTensor, pack_bytes
from conch.frontends.budget import ByteBudget
from conch.frontends.offloading import work
from conch.frontends.offloading.messages import resolve_spans
from conch.frontends.offloading.offloader import LARGE_BYTES, OffloadedCall, Offloader, OffloadingProcess
from conch.machine.memory import children_of
from conch.wire.control import LoadParameters
from conch.wire.endpoints import ENDPOINTS
from conch.wire.json.control import read_load
from conch.wire.json.generate import Layout, decode_generate, encode_generate
from conch.wire.json.infer import JsonOutputPlan, RequestedOutput, decode_infer, encode_infer
from conch.wire.openai.reading import ApiError, Fields
from conch.wire.regions import NO_REGIONS, Regions

pytestmark = pytest.mark.asyncio(loop_scope="module")

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


class RecordedProcess(OffloadingProcess):
    """A process with the sizes of the work that it was given."""

    def __init__(self, threads: Executor, on_exit: Callable[[OffloadingProcess], None]) -> None:
        super().__init__(threads, on_exit)
        self.sizes: list[int] = []
        self.performed = asyncio.Event()

    async def perform(self, work: OffloadedCall, check: Callable[[], ConchError | None]) -> Any:
        self.sizes.append(sum(map(len, work.packing.parts)))
        try:
            return await super().perform(work, check)
        finally:
            self.performed.set()


async def _new_offloader() -> AsyncIterator[Offloader]:
    offloader = Offloader(1 << 30, 30, ByteBudget(1 << 30))
    yield offloader
    await offloader.close()


#: Shared by all tests of this file that leave its processes running: to start one takes as long as all they do.
offloader = pytest_asyncio.fixture(_new_offloader, loop_scope="module", scope="module", name="offloader")
own_offloader = pytest_asyncio.fixture(_new_offloader, loop_scope="module", name="own_offloader")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[RecordedProcess]:
    """The processes that offloaders start."""
    processes: list[RecordedProcess] = []

    def start(threads: Executor, on_exit: Callable[[OffloadingProcess], None]) -> RecordedProcess:
        processes.append(RecordedProcess(threads, on_exit))
        return processes[-1]

    monkeypatch.setattr("conch.frontends.offloading.offloader.OffloadingProcess", start)
    return processes


async def begun(processes: list[RecordedProcess]) -> RecordedProcess:
    """The first process, as soon as there is one."""
    while not processes:
        await asyncio.sleep(0)
    return processes[0]


def ignore(response: InferResponse) -> None:
    raise AssertionError(response)


async def decode_infer_elsewhere(
    offloader: Offloader, body: bytes, *, encoding: str = "", length: int = 0, regions: Regions = NO_REGIONS
) -> tuple[InferRequest, JsonOutputPlan]:
    """Decode in a process, as the front end does; of a body with ``length`` bytes of JSON, only these."""
    view = memoryview(body)
    sent, behind = (view[:length], view[length:]) if length else (view, view[:0])
    size = max(len(body), LARGE_BYTES + 1)
    [request], plan = await offloader.run(size, work.infer, MODEL, sent, len(behind), encoding, None, LIMIT, regions)
    resolve_spans(request, behind, regions)
    return request, plan


async def decode_openai_elsewhere(
    offloader: Offloader, body: bytes, endpoint: str, signature_of: Callable[[str], ModelSignature]
) -> Any:
    return await offloader.run(LARGE_BYTES + 1, work.openai, body, "", LIMIT, signature_of, endpoint)


async def decode_load_elsewhere(offloader: Offloader, body: bytes, size: int = 0) -> LoadParameters:
    return await offloader.run(size or max(len(body), LARGE_BYTES + 1), read_load, body)


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
async def test_a_request_is_what_the_server_would_have_read(offloader: Offloader, encoding: str) -> None:
    body = json.dumps(INFER).encode()
    expected, plan = decode_infer(body, None, MODEL, ignore)
    sent = gzip.compress(body) if encoding else body
    request, read = await decode_infer_elsewhere(offloader, sent, encoding=encoding)
    assert shown(request) == shown(expected)
    assert read == plan
    assert request.inputs["texts"].elements == 2  # the server does not count them again


async def test_tensors_behind_the_json_are_not_sent(offloader: Offloader) -> None:
    tensor = {"name": "numbers", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    texts = {"name": "texts", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 5}}
    document = json.dumps({"inputs": [texts, tensor]}).encode()
    body = document + pack_bytes([b"x"]) + array("f", [1, 2]).tobytes()
    expected, _ = decode_infer(body, len(document), MODEL, ignore)
    request, _ = await decode_infer_elsewhere(offloader, body, length=len(document))
    assert shown(request) == shown(expected)
    assert request.inputs["numbers"].data.obj is body  # type: ignore[union-attr]


async def test_invalid_bodies_are_refused_as_the_server_would(offloader: Offloader) -> None:
    error = await refusal(decode_infer_elsewhere(offloader, b"{]"))
    assert error.code is Code.INTERNAL and "Missing a name for object member" in error.message


async def test_more_inputs_or_outputs_than_the_model_has_are_refused_by_the_process(offloader: Offloader) -> None:
    names = [str(number) for number in range(3)]
    inputs = [{"name": name, "datatype": "FP32", "shape": [1], "data": [1]} for name in names]
    error = await refusal(decode_infer_elsewhere(offloader, json.dumps({"inputs": inputs}).encode()))
    assert error.code is Code.INVALID_ARG and "but got 3 inputs for model 'm'" in error.message
    body = json.dumps({**INFER, "outputs": [{"name": name} for name in names]}).encode()
    error = await refusal(decode_infer_elsewhere(offloader, body))
    assert (error.code, error.message) == (Code.INVALID_ARG, "unexpected inference output '0' for model 'm'")


async def test_parameters_are_checked_by_the_server_while_the_process_decodes(offloader: Offloader) -> None:
    checked: list[list[str]] = []

    def check(names: Iterable[str]) -> None:
        checked.append(list(names))
        if "unknown" in checked[-1]:
            raise invalid("unknown")

    model = replace(MODEL, check_parameters=check)
    arguments = 0, "", None, LIMIT, NO_REGIONS
    [request], _ = await offloader.run(LARGE_BYTES + 1, work.infer, model, json.dumps(INFER).encode(), *arguments)
    assert request.parameters == {"text": "ä", "number": 0.5} and checked == [["text", "number"]]
    body = json.dumps({**INFER, "parameters": {"unknown": 1}}).encode()
    error = await refusal(offloader.run(LARGE_BYTES + 1, work.infer, model, body, *arguments))
    assert (error.code, error.message) == (Code.INVALID_ARG, "unknown")


async def test_strings_of_a_binary_tensor_are_counted_without_returning_them(offloader: Offloader) -> None:
    texts = [WireTensor("t", "BYTES", (3,), pack_bytes([b"", b"a", b"bc"]))]
    assert await offloader.run(LARGE_BYTES + 1, work.strings, "m", "an id", texts) == [3]
    texts[0].data = texts[0].data[:-1]
    error = await refusal(offloader.run(LARGE_BYTES + 1, work.strings, "m", "an id", texts))
    assert "incomplete string data for inference input 't'" in error.message


async def test_parameters_that_would_keep_the_server_busy_are_refused(offloader: Offloader) -> None:
    body = json.dumps({**INFER, "parameters": {str(index): index for index in range(20_000)}}).encode()
    error = await refusal(decode_infer_elsewhere(offloader, body))
    assert error.code is Code.INVALID_ARG and "20000 parameters; at most 10000" in error.message


async def test_a_message_does_not_repeat_all_that_the_client_sent(offloader: Offloader) -> None:
    tensor = {"name": "x" * 1_000_000, "datatype": "FP32", "shape": [1], "data": [1]}
    body = json.dumps({"inputs": [tensor, tensor]}).encode()
    error = await refusal(decode_infer_elsewhere(offloader, body))
    assert len(error.message) < 20_000 and error.message.startswith("[request id: <id_unknown>] input 'xxx")


async def test_texts_of_generate_become_requests(offloader: Offloader) -> None:
    body = json.dumps({"text_input": ["a", "b"], "messages": "c"}).encode()
    several, layout = await offloader.run(LARGE_BYTES + 1, decode_generate, LANGUAGE, body, True, LIMIT)
    assert layout is None
    assert [bytes(one.inputs["text_input"].data)[4:] for one in several] == [b"a", b"b"]
    body = b'{"text_input": "a", "top_k": 1}'
    [single], layout = await offloader.run(LARGE_BYTES + 1, decode_generate, LANGUAGE, body, True, LIMIT)
    assert layout is Layout.FLAT and single.parameters == {"top_k": 1}


@pytest.mark.parametrize(
    ("endpoint", "members"),
    [
        ("chat", {"messages": [{"role": "user", "content": "ä"}], "max_tokens": 5, "n": 2, "logprobs": False}),
        ("completion", {"prompt": ["a", "b"], "echo": True, "stream": True}),
    ],
)
async def test_openai_requests_are_what_the_server_would_have_read(
    offloader: Offloader, endpoint: str, members: dict
) -> None:
    expected = ENDPOINTS[endpoint].read(Fields(members))
    body = json.dumps({"model": "l", **members}).encode()
    plan, inputs = await decode_openai_elsewhere(offloader, body, endpoint, lambda name: LANGUAGE)
    assert plan == expected.plan
    wanted = expected.inputs(LANGUAGE)
    assert [{name: bytes(one.data) for name, one in part.items()} for part in inputs] == [
        {name: bytes(one.data) for name, one in part.items()} for part in wanted
    ]


@pytest.mark.parametrize(
    ("endpoint", "members"),
    [
        ("embeddings", {"model": "l", "input": ["a", "b", "c"], "encoding_format": "base64"}),
        ("tei_similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
        ("cohere_embed", {"texts": ["a", "x" * 5000], "embedding_types": ["int8"]}),
    ],
)
async def test_retrieval_in_a_process_is_the_same_as_here(offloader: Offloader, endpoint: str, members: dict) -> None:
    named: list[Any] = []

    def signature_of(chosen: list[str]) -> ModelSignature:
        named.append(chosen)
        return LANGUAGE

    body = json.dumps(members).encode()
    arguments: Any = (body, "", LIMIT, signature_of, endpoint, "")
    plan, inputs = await offloader.run(LARGE_BYTES + 1, work.retrieval, *arguments)
    expected, wanted = work.retrieval(*arguments)
    assert plan == expected
    assert named == [[endpoint, members.get("model", "")]] * 2
    shown = [[{name: bytes(one.data) for name, one in part.items()} for part in parts] for parts in (inputs, wanted)]
    assert shown[0] == shown[1]
    vectors = [
        [WireTensor("embedding", "FP32", (2,), np.array([1, row], "<f4").tobytes())] for row in range(len(inputs))
    ]
    bodies = [await offloader.run(size, work.retrieval_body, plan, "l", vectors) for size in (0, LARGE_BYTES + 1)]
    here, there = (json.loads(bytes(body)) for body in bodies)
    if isinstance(here, dict):
        here["id"] = there["id"] = ""
    assert here == there


async def test_the_tools_of_a_chat_are_found_in_its_answer(offloader: Offloader) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("b", "a")]
    body = {"model": "l", "messages": [{"role": "user", "content": ""}], "tools": tools}
    model = ModelSignature(
        "l", 1, 0, {**LANGUAGE.inputs, "tools": TensorSpec("tools", "BYTES", (1,))}, LANGUAGE.outputs
    )
    plan, _ = await decode_openai_elsewhere(offloader, json.dumps(body).encode(), "chat", lambda name: model)
    assert plan.tools.parameters == {"b": {}, "a": {}} and plan.tools.mode == "auto"  # type: ignore[union-attr]


async def test_an_openai_error_names_its_member(offloader: Offloader) -> None:
    body = b'{"model": "l", "messages": [{"role": "nobody"}]}'
    error = await refusal(decode_openai_elsewhere(offloader, body, "chat", lambda name: LANGUAGE))
    assert isinstance(error, ApiError) and error.param == "messages[0].role"


async def test_a_model_that_is_missing_refuses_the_request_and_the_process_continues(offloader: Offloader) -> None:
    def missing(name: str) -> ModelSignature:
        raise not_found(f"no {name}")

    for _ in range(2):
        error = await refusal(decode_openai_elsewhere(offloader, b'{"model": "x"}', "chat", missing))
        assert (error.code, error.message) == (Code.NOT_FOUND, "no x")
    error = await refusal(decode_infer_elsewhere(offloader, b"{}"))
    assert "inputs" in error.message


@pytest.mark.parametrize("missing", [True, False])
async def test_a_process_that_got_no_answer_to_its_question_is_not_given_other_work(
    own_offloader: Offloader, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    def signature_of(name: str) -> ModelSignature:
        monkeypatch.setattr("conch.frontends.offloading.offloader.SharedMessage", no_memory)
        if missing:
            raise not_found(f"no {name}")
        return LANGUAGE

    def no_memory(*_: object) -> None:
        monkeypatch.undo()
        raise unavailable("there is no memory")

    error = await refusal(decode_openai_elsewhere(own_offloader, b'{"model": "x"}', "chat", signature_of))
    assert "try again" in error.message
    request, _ = await decode_infer_elsewhere(own_offloader, json.dumps(INFER).encode())
    assert request.id == "an id"


async def test_a_load_brings_its_configuration_and_files(offloader: Offloader) -> None:
    body = b'{"parameters": {"config": "\xc3\xa4", "file:1/a": "YWI=", "file:1/b": ""}}'
    assert await decode_load_elsewhere(offloader, body) == read_load(body)
    assert await decode_load_elsewhere(offloader, b"{}") == read_load(b"{}")


def answer() -> tuple[InferRequest, InferResponse]:
    request = InferRequest("m", {}, ignore, model_version=3, id="an id")
    numbers = WireTensor("numbers", "FP32", (1, 3), array("f", [1, float("nan"), -3]).tobytes())
    texts = WireTensor("texts", "BYTES", (1, 2), pack_bytes([b"a", "ä".encode()]))
    return request, InferResponse([numbers, texts], parameters={"n": float("inf")})


LABELS = {"numbers": ["one", "two", "three"]}


@pytest.mark.parametrize(
    "plan",
    [
        JsonOutputPlan(),
        JsonOutputPlan(binary=True),
        JsonOutputPlan(batched=True, outputs={"numbers": RequestedOutput(False, 2), "texts": RequestedOutput(True)}),
    ],
)
async def test_an_answer_is_what_the_server_would_have_written(offloader: Offloader, plan: JsonOutputPlan) -> None:
    request, response = answer()
    document, blobs = encode_infer(request, response, plan, LABELS.get)
    arguments = request, response, plan, LABELS
    size, parts = await offloader.run(LARGE_BYTES + 1, work.encode_infer, *arguments, "identity")
    assert b"".join(parts) == b"".join([document, *blobs])
    assert size == (len(document) if blobs else 0)
    _, parts = await offloader.run(LARGE_BYTES + 1, work.encode_infer, *arguments, "gzip")
    assert gzip.decompress(b"".join(parts)) == b"".join([document, *blobs])


async def test_an_answer_of_generate_is_what_the_server_would_have_written(offloader: Offloader) -> None:
    request, response = answer()
    body = await offloader.run(LARGE_BYTES + 1, encode_generate, request, response, Layout.ROW)
    assert body == encode_generate(request, response, Layout.ROW)


async def test_what_takes_too_long_is_refused_and_the_next_is_served() -> None:
    offloader = Offloader(1 << 30, 0.1, ByteBudget(1 << 30), wall_seconds=60)
    error = await refusal(decode_infer_elsewhere(offloader, b"[" + b"{}," * 2_000_000 + b"{}]"))
    assert error.code is Code.INVALID_ARG and "--offload-timeout-secs" in error.message
    offloader.seconds = 30
    request, _ = await decode_infer_elsewhere(offloader, json.dumps(INFER).encode())
    assert request.id == "an id"
    await offloader.close()


async def test_work_that_gets_no_processor_time_is_to_be_tried_again(own_offloader: Offloader) -> None:
    body = json.dumps(INFER).encode()
    before = set(children_of(os.getpid()))
    await decode_infer_elsewhere(own_offloader, body)
    (process,) = set(children_of(os.getpid())) - before
    os.kill(process, signal.SIGSTOP)
    own_offloader.wall_seconds = 0.01
    error = await refusal(decode_infer_elsewhere(own_offloader, body))
    assert error.code is Code.UNAVAILABLE and error.message.startswith("the server is busy: ")


async def test_what_takes_too_much_memory_is_refused() -> None:
    offloader = Offloader(1 << 20, 30, ByteBudget(1 << 30))  # less than a process has when it has been started
    error = await refusal(decode_infer_elsewhere(offloader, b"[" + b"{}," * 2_000_000 + b"{}]"))
    assert error.code is Code.INVALID_ARG and "--offload-memory" in error.message
    await offloader.close()


async def test_a_process_that_dies_fails_what_it_did_alone(
    own_offloader: Offloader, processes: list[RecordedProcess]
) -> None:
    slow = asyncio.ensure_future(decode_infer_elsewhere(own_offloader, b"[" + b"{}," * 5_000_000 + b"{}]"))
    os.kill((await begun(processes)).pid, signal.SIGKILL)
    assert (await refusal(slow)).code is Code.INTERNAL
    request, _ = await decode_infer_elsewhere(own_offloader, json.dumps(INFER).encode())
    assert request.id == "an id"


async def test_work_that_is_not_awaited_is_not_begun(
    own_offloader: Offloader, processes: list[RecordedProcess]
) -> None:
    body = b"[" + b"{}," * 2_000_000 + b"{}]"
    size = len(body)
    running = [asyncio.ensure_future(decode_load_elsewhere(own_offloader, body)) for _ in range(2)]
    waiting = asyncio.ensure_future(decode_load_elsewhere(own_offloader, b"{}", 100 << 20))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, *running, return_exceptions=True)
    await asyncio.gather(decode_load_elsewhere(own_offloader, b"{ }"), return_exceptions=True)
    assert sorted(size for process in processes for size in process.sizes) == [3, size, size]


async def test_work_that_its_client_gave_up_does_not_keep_the_process(
    own_offloader: Offloader, processes: list[RecordedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conch.frontends.offloading.offloader.GRACE_SECONDS", 0.0)
    slow = asyncio.ensure_future(decode_load_elsewhere(own_offloader, b"[" + b"{}," * 5_000_000 + b"{}]"))
    process = await begun(processes)
    slow.cancel()
    await process.ended.wait()
    assert await decode_load_elsewhere(own_offloader, b"{}") == read_load(b"{}")


async def test_a_process_whose_client_gave_up_gets_no_model(
    own_offloader: Offloader, processes: list[RecordedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may take longer than the grace period to start the process, which would then be killed.
    monkeypatch.setattr("conch.frontends.offloading.offloader.GRACE_SECONDS", 60.0)
    names: list[str] = []

    def signature_of(name: str) -> ModelSignature:
        names.append(name)
        return LANGUAGE

    body = b'{"model": "x", "messages": [{"role": "user", "content": "y"}]}'
    given_up = asyncio.ensure_future(decode_openai_elsewhere(own_offloader, body, "chat", signature_of))
    process = await begun(processes)
    given_up.cancel()
    await process.performed.wait()
    assert names == []
    await decode_openai_elsewhere(own_offloader, body, "chat", signature_of)
    assert names == ["x"] and len(process.sizes) == 2


async def test_a_small_body_does_not_wait_for_giants(
    own_offloader: Offloader, processes: list[RecordedProcess]
) -> None:
    giants = [asyncio.ensure_future(decode_load_elsewhere(own_offloader, b"{}", 100 << 20)) for _ in range(3)]
    os.kill((await begun(processes)).pid, signal.SIGSTOP)  # however long the giants take
    assert await decode_load_elsewhere(own_offloader, b"{}") == read_load(b"{}")
    assert not any(one.done() for one in giants)
    for one in giants:
        one.cancel()
    await asyncio.gather(*giants, return_exceptions=True)


async def test_a_server_that_stops_ends_what_is_in_progress() -> None:
    offloader = Offloader(1 << 30, 30, ByteBudget(1 << 30))
    body = b"[" + b"{}," * 5_000_000 + b"{}]"
    in_flight = [asyncio.ensure_future(refusal(decode_load_elsewhere(offloader, body))) for _ in range(3)]
    await asyncio.sleep(0)
    await offloader.close()
    errors = await asyncio.gather(*in_flight)
    assert errors[-1].code is Code.UNAVAILABLE
    assert (await refusal(decode_load_elsewhere(offloader, b"{}"))).code is Code.UNAVAILABLE


async def test_results_are_counted_while_somebody_has_them() -> None:
    budget = ByteBudget(1 << 30)
    offloader = Offloader(1 << 30, 30, budget)
    request, _ = await decode_infer_elsewhere(offloader, json.dumps(INFER).encode())
    assert budget.used == 12 + 10
    texts = request.inputs["texts"]
    del request
    await asyncio.sleep(0)
    assert budget.used == 12 + 10
    del texts
    assert budget.used == 0
    await offloader.close()
    budget.size = 21
    error = await refusal(decode_infer_elsewhere(offloader, json.dumps(INFER).encode()))
    assert error.code is Code.UNAVAILABLE and budget.used == 0


def grpc_request(*inputs: dict[str, Any], raw: tuple[bytes, ...] = ()) -> service_pb2.ModelInferRequest:
    return service_pb2.ModelInferRequest(model_name="m", id="an id", inputs=inputs, raw_input_contents=raw)


async def decoded_grpc(
    offloader: Offloader, message: service_pb2.ModelInferRequest
) -> tuple[service_pb2.ModelInferRequest, list[bytes], list[int | None]]:
    rest, raw, elements = await offloader.run(LARGE_BYTES + 1, work.grpc_infer, message.SerializeToString())
    return service_pb2.ModelInferRequest.FromString(bytes(rest)), list(map(bytes, raw)), elements


async def test_values_in_a_grpc_message_become_bytes(offloader: Offloader) -> None:
    numbers = {"name": "n", "datatype": "FP32", "shape": [2], "contents": {"fp32_contents": [1, 2]}}
    texts = {"name": "t", "datatype": "BYTES", "shape": [2], "contents": {"bytes_contents": [b"a", b""]}}
    message, raw, elements = await decoded_grpc(offloader, grpc_request(numbers, texts))
    assert raw == [array("f", [1, 2]).tobytes(), pack_bytes([b"a", b""])]
    assert elements == [None, 2]
    assert message.id == "an id" and not any(tensor.HasField("contents") for tensor in message.inputs)


async def test_raw_texts_of_a_grpc_message_are_counted_and_malformed_ones_refused(offloader: Offloader) -> None:
    texts = {"name": "t", "datatype": "BYTES", "shape": [2]}
    data = pack_bytes([b"a", b""])
    assert (await decoded_grpc(offloader, grpc_request(texts, raw=(data,))))[1:] == ([data], [2])
    for broken in (data[:-1], data[:5] + b"\x01\0\0\0"):
        error = await refusal(decoded_grpc(offloader, grpc_request(texts, raw=(broken,))))
        assert error.code is Code.INVALID_ARG and "for inference input 't'" in error.message


async def test_what_is_wrong_with_a_grpc_message_is_left_to_be_told(offloader: Offloader) -> None:
    both = {"name": "b", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": [1]}}
    nothing = {"name": "n", "datatype": "FP32", "shape": [1]}
    message, raw, _ = await decoded_grpc(offloader, grpc_request(both, raw=(b"abcd",)))
    assert raw == [b"abcd"] and message.inputs[0].HasField("contents")
    message, raw, _ = await decoded_grpc(offloader, grpc_request(both, nothing, both))
    assert len(raw) == 1 and not message.inputs[1].HasField("contents")
    error = await refusal(offloader.run(LARGE_BYTES + 1, work.grpc_infer, b"\xff"))
    assert (error.code, error.message) == (Code.INTERNAL, "Unable to parse request")
    wrong = {"name": "b", "datatype": "FP32", "shape": [1], "contents": {"bool_contents": [True]}}
    assert "expected datatype 'FP32'" in (await refusal(decoded_grpc(offloader, grpc_request(wrong)))).message
    many = grpc_request(*[nothing] * 60_000)
    assert "in addition to its tensors" in (await refusal(decoded_grpc(offloader, many))).message


class _Regions(Regions):
    """Regions that have everything: ``placed`` are the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.placed: dict[str, tuple[str, int, int]] = {}

    def read(self, datatype: str, name: str, offset: int, size: int) -> bytes:
        return f"{datatype} {name} {offset} {size} ".encode()

    def set_target(self, output: str, name: str, offset: int, size: int) -> None:
        self.placed[output] = name, offset, size


async def test_tensors_in_shared_memory_are_resolved_by_the_server(offloader: Offloader) -> None:
    place = {"shared_memory_region": "r", "shared_memory_offset": 8, "shared_memory_byte_size": 12}
    numbers = {"name": "numbers", "datatype": "FP32", "shape": [1, 3], "parameters": place}
    outputs = [{"name": "numbers", "parameters": place}]
    body = json.dumps({**INFER, "inputs": [numbers, INFER["inputs"][1]], "outputs": outputs}).encode()
    for size in (None, len(body)):
        regions = _Regions()
        if size is None:
            request, plan = await decode_infer_elsewhere(offloader, body, regions=regions)
        else:
            request, plan = await decode_infer_elsewhere(offloader, body, length=size, regions=regions)
        assert bytes(request.inputs["numbers"].data) == b"FP32 r 8 12 "
        assert bytes(request.inputs["texts"].data) == pack_bytes([b"", "ä".encode()])
        assert regions.placed == {"numbers": ("r", 8, 12)}
        assert request.shared is regions
        assert plan.outputs == {"numbers": RequestedOutput(False)}
    error = await refusal(decode_infer_elsewhere(offloader, body))
    assert (error.code, error.message) == (Code.NOT_FOUND, "Unable to find shared memory region: 'r'")
