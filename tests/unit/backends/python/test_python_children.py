"""Processes that a model starts with ``multiprocessing``, in a real worker process whose server is the test."""

from __future__ import annotations

import pytest

from tests.unit.backends.python.interpreters import every_python
from tests.unit.backends.python.worker import LaunchWorker

MODEL = """
import multiprocessing

def double(number):
    return 2 * number

def refused(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__ + ": " + str(error)

class TritonPythonModel:
    def execute(self, requests):
        names = {**globals(), "request": requests[0], "result": None, "context": multiprocessing.get_context("fork")}
        exec(text(requests[0]), names)
        return [answer(str(names["result"]))]
"""

IN_CHILD = """
results = context.Queue()
child = context.Process(target=lambda: results.put(refused({call})))
child.start()
result = results.get(timeout=60)
child.join()
"""


@every_python
def test_forked_and_spawned_children_compute(launch: LaunchWorker) -> None:
    worker = launch(MODEL)
    for method in ("fork", "spawn"):
        code = f"""
import functools, operator
with multiprocessing.get_context("{method}").Pool(1) as pool:
    result = pool.map(functools.partial(operator.mul, 2), [1, 2])
"""
        assert worker.text(code) == "[2, 4]"
    worker.stop()


@pytest.mark.parametrize(
    "call",
    [
        "pb_utils.is_model_ready, 'other'",
        "pb_utils.InferenceRequest(model_name='o', requested_output_names=['O'], inputs=[]).exec",
        "request.is_cancelled",
        "request.get_response_sender().send, answer('x'), flags=1",
        "pb_utils.MetricFamily, 'name', '', pb_utils.MetricFamily.COUNTER",
    ],
)
def test_child_that_would_talk_to_the_server_is_told_who_can(launch: LaunchWorker, call: str) -> None:
    worker = launch(MODEL)
    told = worker.text(IN_CHILD.format(call=call))
    assert told.startswith("RuntimeError: process ")
    assert told.endswith(
        "was forked by a model, and only the model's process can send responses: pass them to it, for "
        "example through a multiprocessing.Queue"
    )
    assert worker.text("result = 'whole'") == "whole"


def test_what_a_child_logs_is_on_its_standard_error(launch: LaunchWorker) -> None:
    worker = launch(MODEL, fork=False)
    assert worker.text(IN_CHILD.format(call="pb_utils.Logger.log_info, 'of the child'")) == "None"
    assert "of the child\n" in worker.stop()[1]


def test_child_that_returns_from_execute_is_ended(launch: LaunchWorker) -> None:
    worker = launch(MODEL, fork=False)
    assert worker.text("pid = os.fork(); result = os.waitpid(pid, 0)[1] >> 8 if pid else 'the child'") == "1"
    assert worker.text("result = 'whole'") == "whole"
    assert "which a model forked, is terminated because it returned from the model" in worker.stop()[1]


def test_child_is_ended_by_terminate(launch: LaunchWorker) -> None:
    worker = launch(MODEL)
    code = "child = context.Process(target=time.sleep, args=(60,)); child.start(); child.terminate(); child.join(); "
    assert worker.text(code + "result = child.exitcode") == "-15"
    worker.stop()
