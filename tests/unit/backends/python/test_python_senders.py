"""Response senders, decoupled models, coroutines and cancellation, in a real worker process."""

from __future__ import annotations

import pytest

from tests.unit.backends.python.interpreters import every_python
from tests.unit.backends.python.worker import Header, LaunchWorker, Worker, first


def kinds(worker: Worker, count: int) -> list[tuple[object, ...]]:
    """The next frames in short: ``done``, or a response's serial, text or error, and whether it is final."""
    return [kind(worker.read()) for _ in range(count)]


def kind(frame: Header) -> tuple[object, ...]:
    if frame["op"] == "done":
        return ("done", *(frame.get("responses") or frame["error"]))
    content = frame["error"][1] if "error" in frame else first(frame) if frame["outputs"] else None
    return frame["serial"], content, frame["final"]


DECOUPLED = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            exec(text(request), {**globals(), "sender": sender, "request": request})
"""
ONE = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            exec(text(request), {**globals(), "sender": sender, "request": request})
        return [None for request in requests]
"""
FINAL = "flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"


def test_decoupled_model_sends_any_number_of_responses(launch: LaunchWorker) -> None:
    worker = launch(DECOUPLED, decoupled=True)
    worker.submit(f"sender.send(answer('a')); sender.send(answer('b')); sender.send({FINAL})", f"sender.send({FINAL})")
    assert kinds(worker, 5) == [
        (1, "a", False),
        (1, "b", False),
        (1, None, True),
        (2, None, True),
        ("done", None, None),
    ]


def test_last_response_may_carry_the_end(launch: LaunchWorker) -> None:
    worker = launch(DECOUPLED, decoupled=True)
    worker.submit(f"sender.send(answer('a'), {FINAL})")
    assert kinds(worker, 2) == [(1, "a", True), ("done", None)]


@every_python
def test_decoupled_model_sends_from_a_thread_after_execute(launch: LaunchWorker) -> None:
    worker = launch(
        """
    class TritonPythonModel:
        def execute(self, requests):
            threading.Thread(target=self.later, args=(requests[0].get_response_sender(),)).start()
        def later(self, sender):
            for number in range(50):
                sender.send(answer(str(number)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """,
        decoupled=True,
    )
    worker.submit("x")
    worker.submit("y")
    frames = kinds(worker, 104)
    for serial in (1, 2):
        own = [frame for frame in frames if frame[0] == serial]
        assert own == [*((serial, str(number), False) for number in range(50)), (serial, None, True)]


def test_exception_ends_only_the_requests_that_are_open(launch: LaunchWorker) -> None:
    worker = launch(DECOUPLED, decoupled=True)
    worker.submit(f"sender.send(answer('a'), {FINAL})", "raise ValueError('bad')")
    assert kinds(worker, 1) == [(1, "a", True)]
    code, message = worker.read()["error"]
    assert code == "INTERNAL" and "message: ValueError: bad\n" in message


def test_decoupled_model_must_not_return_responses(launch: LaunchWorker) -> None:
    worker = launch(
        "class TritonPythonModel:\n    def execute(self, requests):\n        return [answer('a')]\n", decoupled=True
    )
    assert worker.infer("x")["error"][1] == (
        "Failed to process the request(s) for model 'm_0_0', message: Python model 'm_0_0' is using the decoupled mode "
        "and the execute function must return None."
    )


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("send(answer('a'), flags=2)", "Unable to send response. Unsupported flag provided."),
        ("send()", "Inference Response object must be provided when the response flags is set to zero."),
        (f"send({FINAL}); sender.send(answer('a'))", "Unable to send response. Response sender has been closed."),
        (f"send({FINAL}); sender.send({FINAL})", "Unable to send response. Response sender has been closed."),
    ],
)
def test_wrong_use_of_a_sender_is_reported(launch: LaunchWorker, calls: str, message: str) -> None:
    worker = launch(DECOUPLED, decoupled=True)
    worker.submit(f"sender.{calls}")
    while (frame := worker.read())["op"] != "done":
        pass
    assert f"message: TritonModelException: {message}\n" in frame["error"][1]


def test_model_that_is_not_decoupled_may_send_one_response(launch: LaunchWorker) -> None:
    worker = launch(ONE)
    worker.submit(f"sender.send(answer('a')); sender.send({FINAL})")
    assert kinds(worker, 2) == [(1, "a", True), ("done", None)]


def test_single_response_is_sent_as_it_was_given_to_send(launch: LaunchWorker) -> None:
    worker = launch(ONE)
    worker.submit(
        "values = np.zeros(50_000, np.float32); "
        "sender.send(pb_utils.InferenceResponse([pb_utils.Tensor('OUT', values)])); values += 1; "
        f"sender.send({FINAL})"
    )
    assert not any(worker.read()["outputs"]["OUT"].data)


def test_single_response_may_come_after_execute(launch: LaunchWorker) -> None:
    worker = launch(ONE)
    worker.submit(f"threading.Timer(0.05, lambda: sender.send(answer('late'), {FINAL})).start()")
    assert kinds(worker, 2) == [("done", None), (1, "late", True)]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (f"send({FINAL})", "Non-decoupled model cannot send complete final before sending a response."),
        ("send(answer('a')); sender.send(answer('b'))", "Non-decoupled model cannot send more than one response."),
        (
            f"send(answer('a'), {FINAL}); sender.send(answer('b'))",
            "Non-decoupled model cannot send more than one response.",
        ),
        (f"send(answer('a'), {FINAL}); sender.send({FINAL})", "Response sender has been closed."),
    ],
)
def test_wrong_use_of_the_only_response_is_reported(launch: LaunchWorker, calls: str, message: str) -> None:
    worker = launch(ONE)
    worker.submit(f"sender.{calls}")
    while (frame := worker.read())["op"] != "done":
        pass
    assert f"message: TritonModelException: Unable to send response. {message}\n" in frame["error"][1]


def test_response_sent_wins_over_one_returned_later(launch: LaunchWorker) -> None:
    worker = launch("""
    class TritonPythonModel:
        def execute(self, requests):
            requests[0].get_response_sender().send(answer("sent"), flags=1)
            return [answer("returned")]
    """)
    worker.submit("x")
    assert kinds(worker, 2) == [(1, "sent", True), ("done", None)]
    assert "cannot send more than one response" in worker.logged[0]["message"]


def test_response_sent_without_its_end_and_one_returned_is_an_error(launch: LaunchWorker) -> None:
    worker = launch("""
    class TritonPythonModel:
        def execute(self, requests):
            requests[0].get_response_sender().send(answer("sent"))
            return [answer("returned")]
    """)
    worker.submit("x")
    message = "Unable to send response. Non-decoupled model cannot send more than one response."
    assert kinds(worker, 2) == [(1, message, True), ("done", None)]


def test_execute_that_returns_nothing_leaves_its_requests_open(launch: LaunchWorker) -> None:
    worker = launch("""
    class TritonPythonModel:
        def execute(self, requests):
            if text(requests[0]) == "finish":
                self.sender.send(answer("first"), flags=1)
                return [answer("second")]
            self.sender = requests[0].get_response_sender()
    """)
    worker.submit("start")
    worker.submit("finish")
    frames = [worker.read() for _ in range(3)]
    assert frames[0]["responses"] == [None]
    assert kind(frames[1]) == (1, "first", True)
    assert first(frames[2]["responses"][0]) == "second"


ASYNC = """
class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.sleep(0)
        return [await self.one(request) for request in requests]
    async def one(self, request):
        if text(request) == "raise":
            raise ValueError("bad")
        return answer(text(request))
"""


@every_python
def test_coroutine_is_awaited(launch: LaunchWorker) -> None:
    worker = launch(ASYNC, start=False)
    ready = worker.start()
    assert (ready["op"], ready["async"]) == ("ready", True)
    assert worker.text("hello") == "hello"


@every_python
def test_exception_of_a_coroutine_is_reported_with_its_place(launch: LaunchWorker) -> None:
    worker = launch(ASYNC)
    message = worker.infer("raise")["error"][1]
    before, _, places = message.partition("\n\nAt:\n")
    assert before.endswith("message: ValueError: bad")
    assert places.splitlines()[0].endswith("): one")
    assert all(worker.path in place for place in places.splitlines())


ASYNC_DECOUPLED = """
class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if text(request) == "first":
                self.second = asyncio.Event()
                await self.second.wait()
            elif text(request) == "second":
                self.second.set()
            elif text(request) == "cancel":
                raise asyncio.CancelledError
            else:
                raise ValueError("bad")
            sender.send(answer(text(request)), flags=1)
"""


@every_python
def test_coroutines_of_a_decoupled_model_overlap(launch: LaunchWorker) -> None:
    worker = launch(ASYNC_DECOUPLED, decoupled=True)
    worker.submit("first")
    assert kinds(worker, 1) == [("done", None)]
    worker.submit("second")
    assert set(kinds(worker, 3)) == {("done", None), (1, "first", True), (2, "second", True)}


@pytest.mark.parametrize("how", ["raise", "cancel"])
def test_request_whose_coroutine_fails_ends_and_the_traceback_is_logged(launch: LaunchWorker, how: str) -> None:
    worker = launch(ASYNC_DECOUPLED, decoupled=True)
    worker.submit(how)
    frames = {frame[0]: frame for frame in kinds(worker, 2)}
    assert frames["done"] == ("done", None)
    assert frames[1][2] is True
    assert "Failed to process the request(s) for model 'm_0_0', message: " in str(frames[1][1])
    assert worker.logged[0]["level"] == "ERROR" and "Error" in worker.logged[0]["message"]


WAIT = """
class TritonPythonModel:
    def execute(self, requests):
        if text(requests[0]) == "wait":
            while not requests[0].is_cancelled():
                pass
            others = [request.is_cancelled() for request in requests[1:]]
            return [answer("cancelled", *map(str, others)) for request in requests]
        return [answer(text(request)) for request in requests]
"""


@every_python
def test_cancellation_is_seen_while_executing(launch: LaunchWorker) -> None:
    worker = launch(WAIT)
    serial, _ = worker.submit("wait", "other")
    worker.send({"op": "cancel", "serial": serial})
    (response, _) = worker.read()["responses"]
    assert bytes(response["outputs"]["OUT"].data).endswith(b"False")


def test_batches_that_arrive_while_executing_run_afterwards_in_order(launch: LaunchWorker) -> None:
    worker = launch(WAIT)
    (serial,) = worker.submit("wait")
    worker.submit("second")
    worker.submit("third")
    worker.send({"op": "cancel", "serial": serial})
    assert [first(worker.read()["responses"][0]) for _ in range(3)] == ["cancelled", "second", "third"]


def test_request_cancelled_while_its_batch_waits_is_cancelled_when_it_runs(launch: LaunchWorker) -> None:
    worker = launch(WAIT)
    (running,) = worker.submit("wait")
    (waiting,) = worker.submit("wait")
    worker.send({"op": "cancel", "serial": waiting})
    worker.send({"op": "cancel", "serial": running})
    assert [first(worker.read()["responses"][0]) for _ in range(2)] == ["cancelled", "cancelled"]


def test_cancellation_of_a_request_that_has_ended_does_nothing(launch: LaunchWorker) -> None:
    worker = launch(WAIT)
    worker.infer("x")
    worker.send({"op": "cancel", "serial": 1})
    assert worker.text("y") == "y"


def test_thread_sees_cancellation_while_the_worker_waits_for_work(launch: LaunchWorker) -> None:
    worker = launch(
        """
    class TritonPythonModel:
        def execute(self, requests):
            threading.Thread(target=self.run, args=(requests[0].get_response_sender(),)).start()
        def run(self, sender):
            while not sender.is_cancelled():
                time.sleep(0.001)
            sender.send(answer("cancelled"), flags=1)
    """,
        decoupled=True,
    )
    (serial,) = worker.submit("x")
    assert kinds(worker, 1) == [("done", None)]
    worker.send({"op": "cancel", "serial": serial})
    assert kinds(worker, 1) == [(serial, "cancelled", True)]


def test_coroutine_sees_cancellation(launch: LaunchWorker) -> None:
    worker = launch("""
    class TritonPythonModel:
        async def execute(self, requests):
            while not requests[0].is_cancelled():
                await asyncio.sleep(0.001)
            return [answer("cancelled")]
    """)
    (serial,) = worker.submit("x")
    worker.send({"op": "cancel", "serial": serial})
    assert first(worker.read()["responses"][0]) == "cancelled"


@pytest.mark.parametrize("decoupled", [False, True])
def test_request_that_the_model_drops_ends_with_an_error(launch: LaunchWorker, decoupled: bool) -> None:
    worker = launch("class TritonPythonModel:\n    def execute(self, requests): ...\n", decoupled=decoupled)
    worker.submit("x")
    frames = [worker.read(), worker.read()]
    (response,) = [frame for frame in frames if frame["op"] == "response"]
    assert response["final"]
    assert response["error"] == ["INTERNAL", "The model dropped the request without sending a response."]


def test_sender_that_is_dropped_after_a_response_ends_its_request(launch: LaunchWorker) -> None:
    worker = launch(
        """
    class TritonPythonModel:
        def execute(self, requests):
            requests[0].get_response_sender().send(answer("one"))
    """,
        decoupled=True,
    )
    worker.submit("x")
    frames = [worker.read(), worker.read(), worker.read()]
    responses = [frame for frame in frames if frame["op"] == "response"]
    assert [(len(response["outputs"]), response["final"], "error" in response) for response in responses] == [
        (1, False, False),
        (0, True, False),
    ]
