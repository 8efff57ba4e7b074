"""``set_release_flags``: a model has a request given to it again, in a real worker process whose server is the test."""

from __future__ import annotations

import pytest

from tests.unit.backends.python.worker import LaunchWorker, Worker, first

MODEL = """
AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
ALL = pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL
class TritonPythonModel:
    kept = {}
    def execute(self, requests):
        return [self.answer(request) for request in requests]
    def answer(self, request):
        response = None
        exec(text(request), globals(), locals())
        return self.result
    result = None
"""


def submit_again(worker: Worker, serial: int, code: str) -> None:
    """Give the worker a request that it has rescheduled, as the server does: with the same serial number."""
    worker.serial = serial - 1
    worker.submit(code, flags=0)


@pytest.mark.parametrize("flags", ["AGAIN", "AGAIN | ALL"])
def test_request_that_is_rescheduled_has_no_response_yet(launch: LaunchWorker, flags: str) -> None:
    worker = launch(MODEL)
    worker.submit("self.result = answer('done')", f"self.result = None; request.set_release_flags({flags})")
    done = worker.read()
    assert done["rescheduled"] == [1]
    assert first(done["responses"][0]) == "done"
    assert done["responses"][1] is None
    submit_again(worker, 2, "self.result = answer('again')")
    done = worker.read()  # nothing ended when the model dropped the request
    assert first(done["responses"][0]) == "again"
    assert "rescheduled" not in done


def test_last_flags_hold(launch: LaunchWorker) -> None:
    worker = launch(MODEL)
    code = "request.set_release_flags(AGAIN); request.set_release_flags(ALL); self.result = answer('done')"
    assert worker.text(code) == "done"


def test_response_to_a_request_that_is_rescheduled_fails_the_batch(launch: LaunchWorker) -> None:
    worker = launch(MODEL)
    done = worker.infer("request.set_release_flags(AGAIN); self.result = answer('too soon')")
    assert done["error"] == [
        "INTERNAL",
        "Failed to process the request(s) for model 'm_0_0', message: Expected a None object in the execute function "
        "return list for reschduled request, found type '<class 'conch.backends.python.response.InferenceResponse'>'.",
    ]
    assert worker.text("self.result = answer('next')") == "next"


def test_sender_that_the_model_keeps_still_works_when_the_request_is_back(launch: LaunchWorker) -> None:
    worker = launch(
        """
        class TritonPythonModel:
            def execute(self, requests):
                request, = requests
                if text(request) == "first":
                    self.sender = request.get_response_sender()
                    self.sender.send(answer("one"))
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                else:
                    self.sender.send(answer("two"))
                    request.get_response_sender().send(flags=1)
        """,
        decoupled=True,
    )
    worker.submit("first")
    frames = [worker.read(), worker.read()]
    assert first(frames[0]) == "one"
    assert frames[1]["rescheduled"] == [0]
    submit_again(worker, 1, "second")
    frames = [worker.read(), worker.read(), worker.read()]
    assert [(frame["op"], frame.get("serial"), frame.get("final")) for frame in frames] == [
        ("response", 1, False),
        ("response", 1, True),
        ("done", None, None),
    ]


@pytest.mark.parametrize("flags", ["-1", "'x'", "None", "1.5"])
def test_flags_that_are_none_are_refused(launch: LaunchWorker, flags: str) -> None:
    worker = launch(MODEL)
    code = f"try: request.set_release_flags({flags})\nexcept Exception as e: self.result = answer(type(e).__name__)"
    assert worker.text(code) == "TypeError"
