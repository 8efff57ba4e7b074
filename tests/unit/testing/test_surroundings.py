"""What a model finds around it: modules, threads, the working directory, log and parameters; what is refused."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import conch.testing
from conch.core.errors import ConchError
from conch.testing import ModelReply
from tests.unit.testing.models import GREETER, MAIN, Write, ones


def test_models_do_not_see_each_others_modules() -> None:
    names, path = set(sys.modules), list(sys.path)
    with conch.testing.load(MAIN / "module_a") as a, conch.testing.load(MAIN / "module_b") as b:
        said = [{name: array.tolist() for name, array in model(ones(model)).items()} for model in (a, b, a)]
        assert said[0] == said[2] != said[1]
    assert {name for name in set(sys.modules) - names if "helper" in name or name in ("1", "1.model")} == set()
    assert sys.path == path


LATE = """
import threading
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(),)).start()
    def answer(self, sender):
        gate.wait(60)
        from helper import SAID
        import c_python_backend_utils
        pb_utils.Logger.log_warn("careful")
        said = pb_utils.Tensor("name", np.array([[SAID]], np.object_))
        call = pb_utils.InferenceRequest(model_name="other", requested_output_names=["greeting"], inputs=[said])
        answer = pb_utils.get_output_tensor_by_name(call.exec(), "greeting")
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("greeting", answer.as_numpy())]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        ended.wait(60)
        pb_utils.Logger.log_warn("after the end")
        logged.set()
gate, ended, logged = threading.Event(), threading.Event(), threading.Event()
"""


def test_threads_that_outlive_execute_have_the_model_s_surroundings(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write(LATE, "model_transaction_policy { decoupled: true }")
    (directory / "1" / "helper.py").write_text("SAID = b'from a helper'")
    names, path = set(sys.modules), list(sys.path)
    with conch.testing.load(directory, models={"other": lambda name: {"greeting": name}}) as model:
        events = model.python_model.execute.__globals__
        with conch.testing.load(write(GREETER, name="another")) as another:
            stream = model.stream(name="x")
            assert another(name="Ada").texts("greeting") == ["Hello, Ada"]
            events["gate"].set()
            assert [reply.texts("greeting") for reply in stream] == [["from a helper"]]
        events["ended"].set()
        assert events["logged"].wait(60)
    assert [record.getMessage() for record in caplog.records] == ["careful", "after the end"]
    assert {name for name in set(sys.modules) - names if "helper" in name or "backend_utils" in name} == set()
    assert sys.path == path


def test_working_directory_of_a_model_is_its_own(write: Write, tmp_path: Path) -> None:
    source = GREETER.replace("self.args,", "import os; os.chdir(os.path.dirname(__file__)); self.args,")
    source = source.replace("responses = []", "import os; responses = []; assert os.path.exists('model.py')")
    before = Path.cwd()
    with conch.testing.load(write(source)) as model:
        assert Path.cwd() == before
        model(name="Ada")
        assert Path.cwd() == before


def test_calls_of_several_threads_come_one_after_the_other(write: Write) -> None:
    source = GREETER.replace("responses = []", "responses = []; import time; time.sleep(0.02)")
    path = list(sys.path)
    with conch.testing.load(write(source)) as model, ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda number: model(name=str(number)).texts("greeting"), range(8)))
    assert replies == [[f"Hello, {number}"] for number in range(8)]
    assert sys.path == path


def test_parameter_that_is_no_text_is_refused(write: Write) -> None:
    with pytest.raises(ConchError, match="parameter 'limit' of a model is a text"):
        conch.testing.load(write(GREETER), parameters={"limit": 3})  # type: ignore[dict-item]


def test_what_a_model_logs_is_logged_by_the_test(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    source = GREETER.replace("self.batches.append", 'pb_utils.Logger.log_warn("careful"); self.batches.append')
    with caplog.at_level(logging.WARNING), conch.testing.load(write(source)) as model:
        model(name="Ada")
    assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
        ("conch.models.m", "WARNING", "careful")
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "there is no model at"),
        ("chain", "model 'chain' is an ensemble, which has no code"),
    ],
)
def test_what_cannot_be_run_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConchError, match=message):
        conch.testing.load(MAIN / name)


def test_a_directory_without_a_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "python"')
    with pytest.raises(ConchError, match="at least one version must be available"):
        conch.testing.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("datatype", "value", "expected"),
    [
        ("FP32", [1, 2.5], [1, 2.5]),
        ("FP16", [0.5], [0.5]),
        ("BF16", [1.5, -2], [1.5, -2]),
        ("INT8", [1, -128], [1, -128]),
        ("UINT64", [2**64 - 1], [2**64 - 1]),
        ("BOOL", [True, False], [True, False]),
        ("FP32", [], []),
        ("STRING", [], []),
        ("INT32", [1.5], ConchError),
        ("INT8", [128], ConchError),
        ("STRING", [1], ConchError),
        ("FP32", ["x"], ConchError),
    ],
)
def test_lists_have_the_datatype_of_the_configuration(
    write: Write, datatype: str, value: list[Any], expected: Any
) -> None:
    source = """
    class TritonPythonModel:
        def execute(self, requests):
            (tensor,) = requests[0].inputs()
            if tensor.triton_dtype() == 14:
                return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", tensor.to_dlpack())])]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy())])]
    """
    config = 'backend: "python"\n' + "".join(
        f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: [ -1 ] }}\n'
        for kind, name in (("input", "IN"), ("output", "OUT"))
    )
    with conch.testing.load(write(source, config=config)) as model:
        if expected is ConchError:
            with pytest.raises(ConchError, match="input 'IN' of model 'm' takes"):
                model(IN=value)
        else:
            assert model(IN=value)["OUT"].tolist() == expected


def test_it_needs_no_pytest() -> None:
    program = "import sys; sys.modules['pytest'] = None; import conch.testing; print(conch.testing.load.__name__)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("load\n", "")


def test_a_reply_shows_what_it_has() -> None:
    assert repr(ModelReply({}, {}, ConchError("bad"))) == "ModelReply(error='Internal: bad')"
