"""What a model says beside its answers, as log frames."""

from __future__ import annotations

import re

from tests.unit.backends.python.interpreters import every_python
from tests.unit.backends.python.worker import PREAMBLE, LaunchWorker

LINES = PREAMBLE.count("\n")


@every_python
def test_messages_have_the_models_place(launch: LaunchWorker) -> None:
    worker = launch("""
    import logging, warnings
    class TritonPythonModel:
        def execute(self, requests):
            logging.getLogger("a.b").info("not asked for")
            logging.getLogger("a.b").warning("odd: %d", 3)
            try:
                {}["k"]
            except KeyError:
                logging.getLogger("a.b").exception("worse")
            warnings.warn("old", DeprecationWarning)
            thread = threading.Thread(target=int, args=["x"], name="beside")
            thread.start()
            thread.join()
            breakpoint()
            return [answer("alive")]
    """)
    assert worker.text("x") == "alive"
    said = [
        (entry["level"], entry["file"], entry["line"] - LINES, entry["message"].partition("\n")[0])
        for entry in worker.logged
    ]
    assert said[0] == ("WARNING", "model.py", 6, "odd: 3")
    assert said[1] == ("ERROR", "model.py", 10, "worse")
    assert said[2][3] == "exception in thread 'beside'"
    assert said[3][:3] == ("WARNING", "model.py", 15)
    assert "--debug" in said[3][3]
    assert worker.logged[1]["message"].endswith("KeyError: 'k'")
    assert "ValueError: invalid literal" in worker.logged[2]["message"]


def test_logging_that_a_model_configures_is_its_own(launch: LaunchWorker) -> None:
    worker = launch(
        """
    import logging
    class TritonPythonModel:
        def initialize(self, args):
            logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
        def execute(self, requests):
            logging.info("asked for")
            return [answer("alive")]
    """,
        fork=False,
    )
    assert worker.text("x") == "alive"
    assert worker.logged == []
    assert worker.stop() == ("", "INFO asked for\n")


@every_python
def test_log_of_an_exception_is_its_traceback(launch: LaunchWorker) -> None:
    worker = launch("""
    def inner():
        raise ValueError("bad")
    class TritonPythonModel:
        def execute(self, requests):
            inner()
    """)
    worker.infer("x")
    (entry,) = worker.logged
    assert (entry["file"], entry["line"]) == ("model.py", LINES + 6)
    assert re.fullmatch(
        r"Failed to process the request\(s\) for model 'm_0_0', message: ValueError: bad\n"
        r"Traceback \(most recent call last\):\n"
        rf'  File "{worker.path}", line {LINES + 6}, in execute\n    inner\(\)\n(?:.*\^+\n)?'
        rf'  File "{worker.path}", line {LINES + 3}, in inner\n    raise ValueError\("bad"\)\n(?:.*\^+\n)?'
        r"ValueError: bad",
        entry["message"],
    ), entry["message"]


def test_traceback_of_a_coroutine_begins_in_the_model(launch: LaunchWorker) -> None:
    source = """
    class TritonPythonModel:
        async def execute(self, requests):
            await asyncio.sleep(0)
            raise ValueError("bad")
    """
    for decoupled in (False, True):
        worker = launch(source, decoupled=decoupled)
        worker.submit("x")
        while not worker.logged:
            worker.read()
        lines = worker.logged[0]["message"].splitlines()
        assert lines[2] == f'  File "{worker.path}", line {LINES + 5}, in execute'


@every_python
def test_syntax_error_is_logged_with_its_path_and_line(launch: LaunchWorker) -> None:
    worker = launch("def execute(:\n", start=False)
    failed = worker.start()
    assert failed["op"] == "failed"
    assert failed["error"][1].endswith(f"(model.py, line {LINES + 1})")
    (entry,) = worker.logged
    assert f'  File "{worker.path}", line {LINES + 1}\n    def execute(:\n' in entry["message"]
    assert "backend.py" not in entry["message"]
