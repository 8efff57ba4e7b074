"""Calls of a model to the server (BLS), in a real worker process whose server is the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from conch.backends.python.calls import BlsClient
from conch.backends.python.response import InferenceResponse
from conch.workers.child.packing import Packer
from tests.unit.backends.python.interpreters import every_python
from tests.unit.backends.python.worker import Header, LaunchWorker, Worker, first, string

CALLER = """
from concurrent.futures import ThreadPoolExecutor
def call(name):
    value = pb_utils.Tensor("IN", np.array([name], dtype=np.object_))
    return pb_utils.InferenceRequest(model_name=name, requested_output_names=["OUT"], inputs=[value])
def outcome(response):
    if response.has_error():
        return response.error().message()
    return [tensor.as_numpy()[0].decode() for tensor in response.output_tensors()]
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            names = {**globals(), "request": request, "requests": requests}
            exec(text(request), names)
            responses.append(answer(str(names["result"])))
        return responses
"""


def reply(worker: Worker, call: Header, text: str = "", *, final: bool = True, **fields: Any) -> None:
    packer = Packer()
    tensors = packer.pack([string(text, "OUT")] if text else [])
    header = {"op": "answer", "call": call["call"], "outputs": tensors, "parameters": {}, "final": final, **fields}
    worker.send(header, packer)


def called(worker: Worker) -> Header:
    """The next frame as it is."""
    return worker.receive()[0]


def result(worker: Worker) -> str:
    done = worker.read()
    assert done["op"] == "done", done
    return first(done["responses"][0])


def test_call_says_what_the_model_said(launch: LaunchWorker) -> None:
    worker = launch(CALLER)
    worker.submit("""
value = pb_utils.Tensor("A", np.array([[1, 2]], np.int32))
request = pb_utils.InferenceRequest(
    model_name="other", requested_output_names=["OUT"], inputs=[value], request_id="r", correlation_id="c", flags=1,
    timeout=5, model_version=3, parameters={"p": True},
)
result = outcome(request.exec())
""")
    call = called(worker)
    assert call.pop("inputs") == [["A", "INT32", [1, 2], 8]]
    assert call == {
        "op": "call", "call": 1, "decoupled": False, "model": "other", "version": 3, "id": "r",
        "correlation_id": "c", "flags": 1, "timeout": 5, "parameters": {"p": True}, "outputs": ["OUT"],
    }  # fmt: skip
    reply(worker, call, "yes")
    assert result(worker) == "['yes']"


def test_frames_that_come_during_a_call_wait_for_its_end(launch: LaunchWorker) -> None:
    worker = launch(CALLER)
    worker.submit("result = outcome(call('a').exec())")
    call = called(worker)
    worker.submit("result = 'second'")
    reply(worker, call, "first")
    assert [result(worker), result(worker)] == ["['first']", "second"]


def test_cancellation_during_a_call_is_seen_after_it(launch: LaunchWorker) -> None:
    worker = launch(CALLER)
    [serial] = worker.submit(
        "before = request.is_cancelled(); call('a').exec(); result = before, request.is_cancelled()"
    )
    call = called(worker)
    worker.send({"op": "cancel", "serial": serial})
    reply(worker, call)
    assert result(worker) == "(False, True)"


def test_cancellation_of_a_request_that_waits_during_a_call_is_kept(launch: LaunchWorker) -> None:
    worker = launch(CALLER)
    worker.submit("result = outcome(call('a').exec())")
    call = called(worker)
    [serial] = worker.submit("result = request.is_cancelled()")
    worker.send({"op": "cancel", "serial": serial})
    reply(worker, call)
    assert [result(worker), result(worker)] == ["[]", "True"]


@every_python
def test_answers_to_threads_come_in_any_order(launch: LaunchWorker) -> None:
    worker = launch(CALLER)
    worker.submit("""
with ThreadPoolExecutor(16) as pool:
    result = list(pool.map(lambda number: outcome(call(str(number)).exec()), range(16)))
""")
    calls = [called(worker) for _ in range(16)]
    for call in reversed(calls):
        reply(worker, call, call["model"])
    assert result(worker) == str([[str(number)] for number in range(16)])


@every_python
def test_responses_arrive_while_the_model_does_something_else(launch: LaunchWorker) -> None:
    worker = launch(CALLER)
    worker.submit("""
responses = call("many").exec(decoupled=True)
call("one").exec()
result = [outcome(response) for response in responses]
""")
    many, one = called(worker), called(worker)
    assert (many["decoupled"], one["decoupled"]) == (True, False)
    reply(worker, many, "a", final=False)
    reply(worker, one)
    reply(worker, many, "b", final=False)
    reply(worker, many)
    assert result(worker) == "[['a'], ['b'], []]"


@every_python
def test_coroutines_wait_for_several_calls(launch: LaunchWorker) -> None:
    worker = launch("""
    async def one(name):
        value = pb_utils.Tensor("IN", np.array([name], dtype=np.object_))
        request = pb_utils.InferenceRequest(model_name=name, requested_output_names=["OUT"], inputs=[value])
        texts = []
        async for response in await request.async_exec(decoupled=True):
            texts += [tensor.as_numpy()[0].decode() for tensor in response.output_tensors()]
        return texts
    class TritonPythonModel:
        async def execute(self, requests):
            return [answer(str(await asyncio.gather(one("a"), one("b"))))]
    """)
    for round in range(2):
        worker.submit("x")
        a, b = called(worker), called(worker)
        reply(worker, b, f"b{round}", final=False)
        reply(worker, a, f"a{round}", final=False)
        reply(worker, b)
        reply(worker, a)
        assert result(worker) == f"[['a{round}'], ['b{round}']]"


class SilentChannel:
    """The channel of a worker to which a test passes the responses itself."""

    def send(self, header: Header, packer: Packer | None = None) -> None:
        pass

    def wait(self, ready: Callable[[], bool]) -> None:
        pass

    def post(self, header: Header, packer: Packer | None = None) -> None:
        pass


def test_response_to_a_coroutine_that_gives_up_goes_to_the_next_one() -> None:
    async def model() -> None:
        call = BlsClient(SilentChannel()).start({})  # type: ignore[arg-type]
        first = call.next_later(lambda item: item[0])
        first.cancel()
        response, last = InferenceResponse(), InferenceResponse()
        call.add(response, False)
        second = call.next_later(lambda item: item[0])
        third = call.next_later(lambda item: item[0])
        call.add(last, True)
        assert await asyncio.wait_for(second, 60) is response
        assert await asyncio.wait_for(third, 60) is last

    asyncio.run(model())


def test_coroutines_that_wait_for_one_call_get_its_responses_in_order() -> None:
    async def model() -> None:
        call = BlsClient(SilentChannel()).start({})  # type: ignore[arg-type]
        first, second = (call.next_later(lambda item: item[0]) for _ in range(2))
        responses = [InferenceResponse() for _ in range(3)]
        call.add(responses[0], False)
        third = call.next_later(lambda item: item[0])  # takes the response before the first coroutine gets it
        call.add(responses[1], False)
        call.add(responses[2], True)
        waiting = asyncio.gather(third, first, second)
        assert await asyncio.wait_for(waiting, 60) == responses

    asyncio.run(model())


def test_iterator_that_is_dropped_cancels_the_call(launch: LaunchWorker) -> None:
    worker = launch(CALLER)
    worker.submit("""
responses = call("many").exec(decoupled=True)
next(responses)
del responses
result = outcome(call("after").exec())
""")
    call = called(worker)
    reply(worker, call, "a", final=False)
    assert called(worker) == {"op": "cancel_call", "call": 1, "drop": True}
    reply(worker, call, "late", final=False)
    after = called(worker)
    reply(worker, call)
    reply(worker, after, "after")
    assert result(worker) == "['after']"


def test_cancelled_call_may_still_answer(launch: LaunchWorker) -> None:
    worker = launch(CALLER)
    worker.submit("""
responses = call("many").exec(decoupled=True)
responses.cancel()
result = [outcome(response) for response in responses]
responses.cancel()
""")
    call = called(worker)
    assert called(worker) == {"op": "cancel_call", "call": 1, "drop": False}
    reply(worker, call, error=["CANCELLED", "gone"])
    assert result(worker) == "['gone']"


def test_error_has_its_code(launch: LaunchWorker) -> None:
    worker = launch(CALLER)
    worker.submit("error = call('a').exec().error(); result = error.code().name, error.message()")
    reply(worker, called(worker), error=["UNAVAILABLE", "full"])
    assert result(worker) == "('UNAVAILABLE', 'full')"


@every_python
def test_large_answers_give_their_memory_back(launch: LaunchWorker) -> None:
    worker = launch(CALLER)
    worker.submit("""
for number in range(20):
    call("a").exec()
responses = call("a").exec(decoupled=True)
del responses
result = "done"
""")
    for _ in range(20):
        reply(worker, called(worker), "x" * 1_000_000)
    dropped = called(worker)
    assert called(worker)["op"] == "cancel_call"
    reply(worker, dropped, "x" * 1_000_000)
    assert result(worker) == "done"
    worker.submit("result = 'again'")
    assert result(worker) == "again"
    assert len(worker.endpoint.pool.lent) == 0
    assert len(worker.endpoint.pool.free) <= 2


def test_models_are_not_called_before_and_after_execute(launch: LaunchWorker) -> None:
    worker = launch(
        CALLER
        + """
    def initialize(self, args):
        self.attempt("initialize")
    def finalize(self):
        self.attempt("finalize")
    def attempt(self, when):
        try:
            call("a").exec()
        except pb_utils.TritonModelException as error:
            print(when, error)
"""
    )
    out, _ = worker.stop()
    message = "BLS is only supported during the 'execute' function."
    assert out.splitlines() == [f"initialize {message}", f"finalize {message}"]


@every_python
def test_models_are_loaded_in_initialize(launch: LaunchWorker) -> None:
    worker = launch(
        """
    class TritonPythonModel:
        def initialize(self, args):
            pb_utils.load_model("other", config="{}", files={"file:1/model.py": b"pass", "file:1/empty": b""})
            pb_utils.unload_model("third", unload_dependents=True)
            print(pb_utils.is_model_ready("other", "2"))
    """,
        start=False,
    )
    load = worker.start()
    assert load.pop("inputs") == [["file:1/model.py", "UINT8", [4], 4], ["file:1/empty", "UINT8", [0], 0]]
    assert load == {
        "op": "model_control", "call": 1, "do": "load", "model": "other", "config": "{}", "starting": True,
    }  # fmt: skip
    reply(worker, load)
    unload = called(worker)
    assert (unload["do"], unload["model"], unload["dependents"]) == ("unload", "third", True)
    reply(worker, unload)
    ready = called(worker)
    assert (ready["do"], ready["model"], ready["version"]) == ("ready", "other", 2)
    reply(worker, ready, parameters={"ready": True})
    assert called(worker)["op"] == "ready"
    assert worker.stop()[0] == "True\n"


def test_load_that_fails_raises(launch: LaunchWorker) -> None:
    worker = launch(CALLER)
    worker.submit("""
try:
    pb_utils.load_model("other")
except pb_utils.TritonModelException as error:
    result = error
""")
    reply(worker, called(worker), error=["INVALID_ARG", "no such model"])
    assert result(worker) == (
        "Failed to load model: Failed to process the request for model 'm_0_0', message: no such model"
    )


def test_version_that_is_none_is_refused(launch: LaunchWorker) -> None:
    worker = launch(CALLER)
    worker.submit("""
try:
    pb_utils.is_model_ready("other", "x")
except pb_utils.TritonModelException as error:
    result = error
""")
    assert "failed to get model version from specified version string 'x'" in result(worker)


def test_version_that_is_none_is_refused_without_a_question(launch: LaunchWorker) -> None:
    worker = launch(CALLER)
    code = """
result = []
for version in ("y", "-2"):
    try:
        pb_utils.is_model_ready("m", version)
    except pb_utils.TritonModelException as error:
        result.append(str(error))
"""
    about = (
        "Failed to check model readiness: Failed to process the request for model 'm_0_0', message: failed to get "
        "model version from specified version string"
    )
    assert eval(worker.text(code)) == [
        f"{about} 'y' (details: stol), version should be an integral value > 0",
        f"{about} '-2', version should be an integral value > 0",
    ]
