"""What happens when a model misbehaves: the text that its client gets, and that the worker lives on."""

from __future__ import annotations

import os
import signal

import pytest

from conch.core.tensors import WireTensor
from tests.unit.backends.python.interpreters import every_python
from tests.unit.backends.python.worker import PREAMBLE, LaunchWorker, Worker

LINES = PREAMBLE.count("\n")


def failure(worker: Worker, *requests: str) -> str:
    code, message = worker.infer(*requests)["error"]
    assert code == "INTERNAL"
    prefix = "Failed to process the request(s) for model 'm_0_0', message: "
    assert message.startswith(prefix)
    return str(message[len(prefix) :])


def run(launch: LaunchWorker, *lines: str) -> str:
    """What an ``execute`` of these lines fails with; its first line is number 3 behind the preamble."""
    body = "\n".join(f"        {line}" for line in lines)
    worker = launch(f"class TritonPythonModel:\n    def execute(self, requests):\n{body}\n")
    return failure(worker, "x").replace(worker.path, "model.py").replace("model.py(", "(")


@every_python
def test_exception_is_reported_with_its_place(launch: LaunchWorker) -> None:
    assert run(launch, "raise ValueError('bäd')") == f"ValueError: bäd\n\nAt:\n  ({LINES + 3}): execute\n"


def test_places_are_listed_from_the_innermost(launch: LaunchWorker) -> None:
    assert run(launch, "def inner():", "    return {}['k']", "inner()") == (
        f"KeyError: 'k'\n\nAt:\n  ({LINES + 4}): inner\n  ({LINES + 5}): execute\n"
    )


def test_line_is_the_last_that_ran(launch: LaunchWorker) -> None:
    assert run(launch, "try:", "    int('x')", "finally:", "    pass; pass", "    str()").endswith(
        f"\n  ({LINES + 7}): execute\n"
    )


def test_exception_without_a_message_says_so(launch: LaunchWorker) -> None:
    assert run(launch, "raise ValueError").startswith("ValueError: <EMPTY MESSAGE>\n\nAt:\n")


def test_exception_that_cannot_be_printed_is_described_all_the_same(launch: LaunchWorker) -> None:
    text = run(launch, "class E(Exception):", "    def __str__(self):", "        raise TypeError('no')", "raise E()")
    assert text == (
        "E: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>\n\n"
        f"At:\n  ({LINES + 6}): execute\n\n"
        "MESSAGE UNAVAILABLE DUE TO EXCEPTION: TypeError: no\n\n"
        f"At:\n  ({LINES + 5}): __str__\n"
    )


def test_exception_of_pb_utils_is_placed_in_the_model(launch: LaunchWorker) -> None:
    assert run(launch, "pb_utils.Tensor('', np.zeros(1))") == (
        f"TritonModelException: Tensor name cannot be an empty string.\n\nAt:\n  ({LINES + 3}): execute\n"
    )


def test_text_that_is_not_unicode_is_reported_as_far_as_it_goes(launch: LaunchWorker) -> None:
    assert run(launch, "raise ValueError('a\\ud800b')").startswith("ValueError: a\\ud800b\n")


def test_exit_in_execute_fails_the_batch_and_nothing_else(launch: LaunchWorker) -> None:
    worker = launch("""
    class TritonPythonModel:
        def execute(self, requests):
            if text(requests[0]) == "exit":
                sys.exit(3)
            return [answer("alive")]
    """)
    assert failure(worker, "exit").startswith("SystemExit: 3\n\nAt:\n")
    assert worker.text("x") == "alive"


def test_failure_is_logged(launch: LaunchWorker) -> None:
    worker = launch("class TritonPythonModel:\n    def execute(self, requests):\n        raise ValueError('bad')\n")
    failure(worker, "x")
    assert [(entry["level"], "ValueError: bad" in entry["message"]) for entry in worker.logged] == [("ERROR", True)]


def test_what_a_model_prints_does_not_reach_the_channel(launch: LaunchWorker) -> None:
    worker = launch(
        """
    print("at import")
    class TritonPythonModel:
        def execute(self, requests):
            print("in execute")
            print("to stderr", file=sys.stderr)
            os.system("echo from a child")
            os.write(1, b"raw" + bytes([10]))
            return [answer(repr(sys.stdin.read()))]
        def finalize(self):
            print("in finalize")
    """,
        fork=False,
    )
    assert worker.text("x") == "''"
    out, err = worker.stop()
    assert sorted(out.split("\n")) == ["", "at import", "from a child", "in execute", "in finalize", "raw"]
    assert err == "to stderr\n"


def test_frame_that_lies_about_a_tensor_fails_its_batch_only(launch: LaunchWorker) -> None:
    worker = launch("class TritonPythonModel:\n    def execute(self, requests):\n        return [answer('alive')]\n")
    fields = {
        "serial": 9,
        "id": "",
        "correlation_id": 0,
        "flags": 0,
        "timeout": 0,
        "parameters": {},
        "outputs": ["OUT"],
    }
    for inputs in ([["X", "FP32", [99], 396]], [["X", "FP32", [1], 4, 7, 0]], 5):
        worker.send({"op": "execute", "batch": 5, "requests": [{**fields, "inputs": inputs}]})
        done = worker.read()
        assert done["batch"] == 5 and done["error"][0] == "INTERNAL"
    assert worker.text("x") == "alive"


def test_strings_that_do_not_fit_their_shape_fail_in_as_numpy(launch: LaunchWorker) -> None:
    worker = launch("""
    class TritonPythonModel:
        def execute(self, requests):
            requests[0].inputs()[0].as_numpy()
    """)

    for data in (b"\5\0\0\0ab", b"\1\0", b"\1\0\0\0a" * 2, b""):
        (message,) = [worker.infer([WireTensor("IN", "BYTES", (1,), data)])["error"][1]]
        assert "TritonModelException: " in message


def test_worker_ends_when_the_server_hangs_up(launch: LaunchWorker) -> None:
    worker = launch("class TritonPythonModel:\n    def execute(self, requests): ...\n")
    worker.socket.close()
    assert worker.process.wait(60) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_the_whole_group_leaves_the_worker_to_the_server(
    launch: LaunchWorker, number: signal.Signals
) -> None:
    worker = launch("class TritonPythonModel:\n    def execute(self, requests):\n        return [answer('alive')]\n")
    worker.process.send_signal(number)
    assert worker.text("x") == "alive"


def test_worker_ends_in_the_middle_of_execute_when_it_looks_for_cancellation(launch: LaunchWorker) -> None:
    worker = launch("""
    class TritonPythonModel:
        def execute(self, requests):
            while not requests[0].is_cancelled():
                pass
    """)
    worker.submit("x")
    worker.socket.close()
    assert worker.process.wait(60) == 1


def test_process_forked_by_the_model_does_not_keep_the_channel_open(launch: LaunchWorker) -> None:
    worker = launch("""
    class TritonPythonModel:
        def execute(self, requests):
            read, self.write = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(self.write)
                os.read(read, 1)
                os._exit(0)
            return [answer(str(pid))]
    """)
    forked = int(worker.text("x"))
    worker.process.kill()
    with pytest.raises(EOFError):
        worker.receive()
    try:
        os.kill(forked, signal.SIGKILL)
    except ProcessLookupError:
        pass
