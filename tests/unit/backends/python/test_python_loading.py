"""Loading: the module's name and path, initialize, auto_complete_config, logging and the end of a worker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.backends.python.interpreters import every_python
from tests.unit.backends.python.worker import PREAMBLE, LaunchWorker, Worker

LINES = PREAMBLE.count("\n")
IDLE = "class TritonPythonModel:\n    def execute(self, requests): ...\n"


def complete(worker: Worker) -> dict[str, Any]:
    """The completed configuration."""
    answer = worker.ask({"op": "complete"})
    assert answer["op"] == "completed", answer
    return dict(json.loads(answer["config"]))


def failed(answer: dict[str, Any], worker: Worker) -> tuple[str, str]:
    assert answer["op"] == "failed"
    code, message, _ = answer["error"]
    return code, message.replace(worker.path, "model.py")


@every_python
def test_initialize_gets_seven_strings(launch: LaunchWorker) -> None:
    worker = launch(
        """
    class TritonPythonModel:
        def initialize(self, args):
            self.args = args
        def execute(self, requests):
            return [answer(repr(self.args))]
    """,
        start=False,
    )
    ready = worker.start(name="m_0_1", kind="GPU", device_id=3)
    assert (ready["op"], ready["async"]) == ("ready", False)
    assert ready["runs_with"]["engine"].startswith("python 3.")
    assert eval(worker.text("x")) == {
        "model_config": json.dumps(worker.config),
        "model_instance_kind": "GPU",
        "model_instance_name": "m_0_1",
        "model_instance_device_id": "3",
        "model_repository": str(worker.directory),
        "model_version": "1",
        "model_name": "m",
    }


def test_module_is_named_by_its_version_and_finds_its_siblings(launch: LaunchWorker) -> None:
    worker = launch(
        """
    import beside, shared
    class TritonPythonModel:
        def execute(self, requests):
            return [answer(f"{__name__} {beside.__name__} {shared.__name__} {pb_utils.get_model_dir()}")]
    """,
        start=False,
    )
    (worker.directory / "1" / "beside.py").touch()
    (worker.directory / "shared.py").touch()
    assert worker.start()["op"] == "ready"
    assert worker.text("x") == f"1.model beside shared {worker.directory / '1'}"


def test_file_of_another_name_is_loaded(launch: LaunchWorker) -> None:
    worker = launch(
        "class TritonPythonModel:\n    def execute(self, requests):\n        return [answer(__name__)]\n",
        default_model_filename="other.py",
    )
    assert worker.text("x") == "1.other"


def test_model_finds_only_what_its_environment_has(launch: LaunchWorker) -> None:
    worker = launch("""
    class TritonPythonModel:
        def execute(self, requests):
            own = [path for path in sys.path if "conch" in os.path.basename(path) or path.endswith("workers")]
            alias = sys.modules["c_python_backend_utils"] is pb_utils
            return [answer(repr((own, "channel" in sys.modules, alias, sys.argv)))]
    """)
    assert worker.text("x") == "([], False, True, [''])"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import nosuch",
            f"ModuleNotFoundError: No module named 'nosuch'\n\nAt:\n  model.py({LINES + 1}): <module>\n",
        ),
        ("x = 1", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
        ("def (:", f"SyntaxError: invalid syntax (model.py, line {LINES + 1})"),
        (
            "class TritonPythonModel:\n    def __init__(self): raise ValueError('in ctor')",
            f"ValueError: in ctor\n\nAt:\n  model.py({LINES + 2}): __init__\n",
        ),
        (
            "class TritonPythonModel:\n    def initialize(self, args): raise ValueError('in init')",
            f"ValueError: in init\n\nAt:\n  model.py({LINES + 2}): initialize\n",
        ),
        (
            "class TritonPythonModel:\n    def initialize(self, args): sys.exit(1)",
            f"SystemExit: 1\n\nAt:\n  model.py({LINES + 2}): initialize\n",
        ),
    ],
)
def test_model_that_cannot_start_says_why(launch: LaunchWorker, source: str, message: str) -> None:
    worker = launch(source, start=False)
    code, text = failed(worker.start(), worker)
    assert code == "INTERNAL"
    assert text.startswith(message)


def test_missing_file_is_named(launch: LaunchWorker) -> None:
    worker = launch(None, start=False)
    assert failed(worker.start(), worker) == ("INTERNAL", "Python model file not found in 'model.py'")


def test_missing_execute_fails_the_requests(launch: LaunchWorker) -> None:
    worker = launch("class TritonPythonModel: ...")
    assert worker.infer("x")["error"][1] == (
        "Failed to process the request(s) for model 'm_0_0', message: "
        f"Python model {worker.path} does not implement `execute` method."
    )


def test_unknown_choice_of_input_memory_is_refused(launch: LaunchWorker) -> None:
    parameters = {"FORCE_CPU_ONLY_INPUT_TENSORS": {"string_value": "maybe"}}
    worker = launch(IDLE, start=False, parameters=parameters)
    assert failed(worker.start(), worker) == (
        "UNSUPPORTED",
        "Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: maybe'",
    )


COMPLETE = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        {}
    def initialize(self, args):
        self.config = args["model_config"]
    def execute(self, requests):
        return [answer(self.config)]
"""


@every_python
def test_configuration_is_completed_and_the_same_worker_starts(launch: LaunchWorker) -> None:
    worker = launch(
        COMPLETE.format(
            "config.add_input({'name': 'IN', 'data_type': 'TYPE_STRING', 'dims': [1]}); "
            "config.add_output({'name': 'OUT', 'data_type': 'TYPE_STRING', 'dims': [1]}); "
            "config.set_max_batch_size(8); config.set_dynamic_batching(); return config"
        ),
        start=False,
    )
    completed = complete(worker)
    assert completed == {
        "name": "m",
        "max_batch_size": 8,
        "input": [{"name": "IN", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]}],
        "dynamic_batching": {},
    }
    worker.config = completed
    assert worker.start()["op"] == "ready"
    assert json.loads(worker.text("x")) == completed


def test_model_without_the_function_keeps_its_configuration(launch: LaunchWorker) -> None:
    worker = launch(IDLE, start=False, parameters={"a": {"string_value": "b"}})
    assert complete(worker) == worker.config


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object."),
        ("raise ValueError('ac')", f"ValueError: ac\n\nAt:\n  model.py({LINES + 5}): auto_complete_config\n"),
        ("sys.exit(1)", f"SystemExit: 1\n\nAt:\n  model.py({LINES + 5}): auto_complete_config\n"),
    ],
)
def test_completion_that_fails_says_why(launch: LaunchWorker, body: str, message: str) -> None:
    worker = launch(COMPLETE.format(body), start=False)
    assert failed(worker.ask({"op": "complete"}), worker) == ("INTERNAL", message)


LOG = """
class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_info("info")
        pb_utils.Logger.log_warn("wärn")
        pb_utils.Logger.log_error("error")
        pb_utils.Logger.log_verbose("verbose")
        pb_utils.Logger.log("log", pb_utils.Logger.WARNING)
        return [answer("x")]
"""


@every_python
def test_log_messages_carry_the_line_of_the_model(launch: LaunchWorker) -> None:
    worker = launch(LOG)
    worker.infer("x")
    assert [(e["level"], e["file"], e["line"] - LINES, e["message"]) for e in worker.logged] == [
        ("INFO", "model.py", 4, "info"),
        ("WARNING", "model.py", 5, "wärn"),
        ("ERROR", "model.py", 6, "error"),
        ("WARNING", "model.py", 8, "log"),
    ]


def test_log_settings_change_while_the_model_runs(launch: LaunchWorker) -> None:
    worker = launch(LOG)
    worker.send({"op": "log", "log": {"info": False, "warning": False, "error": False, "verbose": 1}})
    worker.infer("x")
    assert [entry["level"] for entry in worker.logged] == ["VERBOSE"]


@every_python
def test_finalize_is_called_before_the_end(launch: LaunchWorker) -> None:
    worker = launch("class TritonPythonModel:\n    def execute(self, r): ...\n    def finalize(self): print('bye')\n")
    assert worker.stop() == ("bye\n", "")


def test_failure_in_finalize_is_logged_and_the_worker_ends_all_the_same(launch: LaunchWorker) -> None:
    worker = launch("class TritonPythonModel:\n    def execute(self, r): ...\n    def finalize(self): sys.exit(3)\n")
    worker.stop()
    assert worker.logged[0]["message"].startswith("SystemExit: 3\n")


def test_worker_ends_although_a_thread_of_the_model_does_not(launch: LaunchWorker) -> None:
    worker = launch("threading.Thread(target=threading.Event().wait).start()\n" + IDLE)
    worker.stop()


def test_exit_handlers_of_the_model_run(launch: LaunchWorker) -> None:
    worker = launch("import atexit\natexit.register(print, 'at exit')\n" + IDLE)
    assert worker.stop()[0] == "at exit\n"


def test_frame_that_is_not_known_is_answered(launch: LaunchWorker) -> None:
    worker = launch(IDLE)
    assert failed(worker.ask({"op": "dance"}), worker)[1] == "unknown frame 'dance'"


def test_worker_runs_without_orjson(launch: LaunchWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "orjson.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = launch("class TritonPythonModel:\n    def execute(self, r):\n        return [answer('é' + text(r[0]))]\n")
    assert worker.text("ü") == "éü"


def test_no_bytecode_is_left_that_a_quick_reload_could_take_for_its_source(
    launch: LaunchWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    source = "class TritonPythonModel:\n    def execute(self, requests):\n        return [answer('{}')]\n"
    worker = launch(source.format("old"))
    assert worker.text("x") == "old"
    # A .pyc would be taken for up to date by its size and second, whatever the source says by then.
    assert list(worker.directory.rglob("*.pyc")) == []
