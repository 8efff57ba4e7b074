"""``is_ready`` of a model, in a real worker process whose server is the test."""

from __future__ import annotations

import pytest

from tests.unit.backends.python.interpreters import every_python
from tests.unit.backends.python.worker import LaunchWorker, Worker

#: Asks without waiting in between, so that no test has to.
HASTE = """
from conch.backends.python import python_backend
python_backend.PERIOD_SECONDS, python_backend.LIMIT_SECONDS = 0.001, {limit}
class TritonPythonModel:
    said = "False"
    {is_ready}
    {execute} execute(self, requests):
        TritonPythonModel.said = text(requests[0])
        return [answer("done")]
"""

SAYS = """
    def is_ready(self):
        return eval(self.said)
"""
SAYS_LATER = SAYS.replace("def", "async def")


def launched(launch: LaunchWorker, is_ready: str = SAYS, execute: str = "def", limit: float = 5) -> Worker:
    worker = launch(HASTE.format(is_ready=is_ready.strip(), execute=execute, limit=limit), start=False)
    worker.send({"op": "start", "instance": {"name": "m_0_0", "kind": "CPU", "device_id": 0}, "config": "{}"})
    assert worker.receive()[0] == {"op": "model_ready", "ready": False}
    assert worker.receive()[0]["op"] == "ready"
    return worker


def after(worker: Worker, said: str) -> bool:
    """Have the model say something; whether it is ready then, which has changed."""
    worker.submit(said)
    frames = {frame["op"]: frame for frame in (worker.receive()[0], worker.receive()[0])}
    assert sorted(frames) == ["done", "model_ready"]
    return bool(frames["model_ready"]["ready"])


@every_python
def test_answers_are_reported_when_they_change(launch: LaunchWorker) -> None:
    worker = launched(launch)
    assert after(worker, "True")
    assert not after(worker, "False")
    worker.stop()


@pytest.mark.parametrize("execute", ["def", "async def"])
def test_coroutine_is_awaited(launch: LaunchWorker, execute: str) -> None:
    worker = launched(launch, SAYS_LATER, execute)
    assert after(worker, "True")
    assert not after(worker, "False")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("1", "model 'm_0_0' is not ready: is_ready() must return a boolean value"),
        ("1 / 0", "model 'm_0_0' is not ready: ZeroDivisionError: division by zero"),
    ],
)
def test_failure_is_no_readiness_and_is_logged_once(launch: LaunchWorker, said: str, message: str) -> None:
    worker = launched(launch)
    assert after(worker, "True")
    assert not after(worker, said)
    assert after(worker, "True")
    assert [frame["message"].partition("\n")[0] for frame in worker.logged].count(message) == 1


def test_model_that_does_not_answer_is_not_ready_until_it_does(launch: LaunchWorker) -> None:
    worker = launched(launch, limit=0.05)
    assert after(worker, "True")
    assert not after(worker, "globals().setdefault('go', threading.Event()).wait()")
