"""``conch.testing``: models of the toy repository, and some that misbehave, in the process of the test."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conch.testing
from conch.errors import Code, ConchError
from conch.testing import ModelReply, ModelRequest, ModelUnderTest
from tests.models import HERE

MAIN = HERE / "main"
BATCHED = """\
backend: "python"
max_batch_size: 4
input { name: "name" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "greeting" data_type: TYPE_STRING dims: [ 1 ] }
"""
PREAMBLE = "import numpy as np, triton_python_backend_utils as pb_utils\n"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a model: ``write(source)``; its configuration is ``BATCHED`` and more lines."""

    def write(source: str, *lines: str, name: str = "m", config: str = BATCHED) -> Path:
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text("\n".join([config, *lines]))
        (tmp_path / name / "1" / "model.py").write_text(PREAMBLE + textwrap.dedent(source))
        return tmp_path / name

    return write


GREETER = """
class TritonPythonModel:
    def initialize(self, args):
        self.args, self.batches, self.ended = args, [], False
    def execute(self, requests):
        self.batches.append(len(requests))
        responses = []
        for request in requests:
            names = pb_utils.get_input_tensor_by_name(request, "name").as_numpy()
            if b"nobody" in names:
                error = pb_utils.TritonError("nobody is there", pb_utils.TritonError.NOT_FOUND)
                responses.append(pb_utils.InferenceResponse([], error))
                continue
            greetings = np.array([b"Hello, " + name for name in names.ravel()], np.object_).reshape(names.shape)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("greeting", greetings)]))
        return responses
    def finalize(self):
        self.ended = True
"""


def test_a_model_answers_and_is_finalised(write: Write) -> None:
    directory = write(GREETER, 'parameters { key: "language" value { string_value: "en" } }')
    with conch.testing.load(directory) as model:
        reply = model(name=["Ada"])
        assert reply["greeting"].tolist() == [[b"Hello, Ada"]]
        assert (reply.texts("greeting"), list(reply), reply.parameters) == (["Hello, Ada"], ["greeting"], {})
        loaded = model.python_model
        assert loaded.args.pop("model_config").startswith("{")
        assert loaded.args == {
            "model_instance_kind": "CPU",
            "model_instance_name": "m_0",
            "model_instance_device_id": "0",
            "model_repository": str(directory),
            "model_version": "1",
            "model_name": "m",
        }
        assert model.config["parameters"] == {"language": {"string_value": "en"}}
    assert loaded.ended
    with pytest.raises(ConchError, match="has been closed"):
        model(name=["Ada"])


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ("Ada", (1, 1)),
        (b"\xff", (1, 1)),
        (["Ada"], (1, 1)),
        (["Ada", "Alan"], (2, 1)),
        ([["Ada"], ["Alan"]], (2, 1)),
        (np.array([["Ada"]]), (1, 1)),
        (np.array([[b"Ada"], [b"Alan"]], np.object_), (2, 1)),
    ],
)
def test_texts_lists_and_arrays_are_inputs(write: Write, value: Any, shape: tuple[int, ...]) -> None:
    with conch.testing.load(write(GREETER)) as model:
        assert model(name=value)["greeting"].shape == shape
        assert model({"name": value})["greeting"].shape == shape


def test_several_requests_are_one_batch_in_which_each_has_its_own_end(write: Write) -> None:
    with conch.testing.load(write(GREETER)) as model:
        replies = model.batch([{"name": ["Ada", "Alan"]}, {"name": "nobody"}, ModelRequest({"name": "Grace"}, id="7")])
        assert model.python_model.batches == [3]
        assert [reply.error is None for reply in replies] == [True, False, True]
        assert replies[2].texts("greeting") == ["Hello, Grace"]
        with pytest.raises(ConchError, match="nobody is there") as raised:
            replies[1]["greeting"]
        assert raised.value.code is Code.NOT_FOUND
        with pytest.raises(ConchError, match="nobody is there"):
            model(name="nobody")
        with pytest.raises(ConchError, match="have 5 rows, and max_batch_size is 4"):
            model.batch([{"name": ["a"] * 3}, {"name": ["b"] * 2}])
        assert model(name="Ada").texts("greeting") == ["Hello, Ada"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {},
            "expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) ['name']",
        ),
        ({"nam": ["Ada"]}, "unexpected inference input 'nam' for model 'm'"),
        ({"name": np.ones((1, 1), np.float32)}, "data-type is 'FP32', but model 'm' expects 'BYTES'"),
        ({"name": np.array(["Ada"])}, "unexpected shape for input 'name' for model 'm'. Expected [-1,1], got [1]."),
        ({"name": ["Ada"] * 5}, "inference request batch-size must be <= 4 for 'm'"),
    ],
)
def test_requests_are_refused_in_the_servers_words(write: Write, inputs: dict[str, Any], message: str) -> None:
    with conch.testing.load(write(GREETER)) as model:
        with pytest.raises(ConchError) as raised:
            model(**inputs)
        assert message in str(raised.value)
        assert model(name="still there").texts("greeting") == ["Hello, still there"]


def ones(model: ModelUnderTest) -> dict[str, Any]:
    """An input of each name, without the batch dimension."""
    return {
        name: np.full([max(dim, 1) for dim in spec.dims], "x" if spec.datatype == "BYTES" else 1).tolist()
        for name, spec in model.signature.inputs.items()
    }


def test_only_the_outputs_that_are_asked_for_come() -> None:
    with conch.testing.load(MAIN / "add_sub") as model:
        assert list(model(ModelRequest(ones(model), outputs=["OUTPUT1"]))) == ["OUTPUT1"]
        with pytest.raises(ConchError, match="unexpected inference output 'OTHER' for model 'add_sub'"):
            model(ModelRequest(ones(model), outputs=["OTHER"]))


def test_optional_inputs_may_be_left_out() -> None:
    with conch.testing.load(MAIN / "optional") as model:
        assert (model(A=[1.0], C=[2.0]).texts("GIVEN"), model(A=[1.0]).texts("GIVEN")) == (["AC"], ["A"])


def test_shapes_are_those_of_clients_where_the_model_sees_others() -> None:
    with conch.testing.load(MAIN / "reshape") as model:
        assert set(model(ones(model))) == set(model.signature.outputs)


def test_a_model_sees_what_a_request_says() -> None:
    with conch.testing.load(MAIN / "echo_request") as model:
        reply = model(ModelRequest(ones(model), id="r", parameters={"k": 5}, correlation_id=7, flags=1))
        (seen,) = map(json.loads, reply.texts(next(iter(reply))))
        assert (seen["id"], seen["correlation_id"], seen["flags"]) == ("r", 7, 1)
        assert seen["parameters"] == {"k": 5}


def test_a_configuration_that_the_model_completes_holds() -> None:
    with conch.testing.load(MAIN / "auto_complete") as model:
        assert model.signature.max_batch_size == 4
        assert model(INPUT=[[1, 2, 3, 4]], SCALE=[2])["OUTPUT"].tolist() == [[2, 4, 6, 8]]
    with pytest.raises(AssertionError), conch.testing.load(MAIN / "auto_complete", parameters={"greeting": "bye"}):
        pass


@pytest.mark.parametrize("name", ["square", "asynchronous_decoupled"])
def test_a_decoupled_model_sends_any_number_of_responses(name: str) -> None:
    expected = {"square": [3, 3, 3], "asynchronous_decoupled": [0, 1, 2]}[name]
    with conch.testing.load(MAIN / name) as model:
        assert [int(reply["OUT"][0]) for reply in model.stream(IN=[3])] == expected
        assert list(model.stream(IN=[0])) == []
        several = model.streams([{"IN": [1]}, {"IN": [2]}])
        assert [len(list(replies)) for replies in several] == [1, 2]
        with pytest.raises(TypeError, match="is decoupled: read its responses with stream"):
            model(IN=[3])


def test_an_asynchronous_model_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with conch.testing.load(MAIN / "asynchronous") as model:
        assert set(model(ones(model))) == set(model.signature.outputs)
    assert set(threading.enumerate()) == before


FAILING = """
def inner(word):
    raise LookupError(f"no {word}")
class TritonPythonModel:
    def initialize(self, args):
        if "initialize" in args["model_name"]:
            inner("weights")
    ASYNCdef execute(self, requests):
        inner("words")
    def finalize(self):
        if "finalize" in pb_utils.get_model_dir():
            inner("end")
"""


@pytest.mark.parametrize("coroutine", ["", "async "])
def test_the_models_exception_is_raised_with_its_own_traceback(write: Write, coroutine: str) -> None:
    directory = write(FAILING.replace("ASYNC", coroutine))
    with conch.testing.load(directory) as model:
        with pytest.raises(LookupError, match="no words") as raised:
            model(name="Ada")
    frames = [(frame.filename, frame.name) for frame in traceback.extract_tb(raised.value.__traceback__)]
    path = str(directory / "1" / "model.py")
    assert frames[-2:] == [(path, "execute"), (path, "inner")]
    assert all("/backends/python/" not in file and "/asyncio/" not in file for file, _ in frames)
    assert raised.value.__cause__ is raised.value.__context__ is None


def test_exceptions_of_the_other_calls_are_raised_too(write: Write) -> None:
    source = FAILING.replace("ASYNC", "")
    with pytest.raises(LookupError, match="no weights"):
        conch.testing.load(write(source, name="initialize"))
    with pytest.raises(LookupError, match="no end"), conch.testing.load(write(source, name="finalize")):
        pass
    with pytest.raises(SyntaxError):
        conch.testing.load(write("def f(:", name="syntax"))
    with pytest.raises(AttributeError, match="TritonPythonModel"):
        conch.testing.load(write("class Model: ...", name="nameless"))


def test_a_failing_coroutine_of_a_decoupled_model_is_raised(write: Write) -> None:
    source = FAILING.replace("ASYNC", "async ")
    with conch.testing.load(write(source, "model_transaction_policy { decoupled: true }")) as model:
        with pytest.raises(LookupError, match="no words"):
            list(model.stream(name="Ada"))


RETURNING = """
class TritonPythonModel:
    def execute(self, requests):
        return EXPRESSION
"""
RESPONSE = "[pb_utils.InferenceResponse([pb_utils.Tensor(NAME, ARRAY)])]"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("3", r"Expected a list in the execute return, found type '<class 'int'>'\."),
        ("[]", "Number of InferenceResponse objects do not match the number of InferenceRequest objects"),
        (RESPONSE.replace("NAME", "'greting'").replace("ARRAY", "np.zeros(1)"), "lacks output 'greeting', which its"),
        (RESPONSE.replace("NAME", "'greeting'").replace("ARRAY", "np.zeros(1)"), "is FP64, but its .* says BYTES"),
        (
            RESPONSE.replace("NAME", "'greeting'").replace("ARRAY", "np.array(['x'])"),
            r"has shape \[1\], but its configuration says \[1,1\]",
        ),
    ],
)
def test_responses_that_do_not_fit_are_refused(write: Write, expression: str, message: str) -> None:
    with conch.testing.load(write(RETURNING.replace("EXPRESSION", expression))) as model:
        with pytest.raises(ConchError, match=message):
            model(name="Ada")


def test_a_response_that_never_comes_is_given_up(write: Write) -> None:
    source = """
    class TritonPythonModel:
        def execute(self, requests):
            self.kept = [request.get_response_sender() for request in requests]
    """
    with conch.testing.load(write(source), timeout=0.05) as model:
        with pytest.raises(TimeoutError, match=r"'m' has not ended a request within 0\.05 s"):
            model(name="Ada")


def test_a_cancelled_request_says_so(write: Write) -> None:
    source = """
    class TritonPythonModel:
        def execute(self, requests):
            said = [np.array([[str(request.is_cancelled())]]) for request in requests]
            return [pb_utils.InferenceResponse([pb_utils.Tensor("greeting", one)]) for one in said]
    """
    with conch.testing.load(write(source)) as model:
        replies = model.batch([{"name": "Ada"}, ModelRequest({"name": "Alan"}, cancelled=True)])
        assert [reply.texts("greeting") for reply in replies] == [["False"], ["True"]]


def test_closing_a_stream_cancels_its_request(write: Write) -> None:
    source = """
    import threading
    class TritonPythonModel:
        def initialize(self, args):
            self.cancelled = threading.Event()
        def execute(self, requests):
            threading.Thread(target=self.send, args=[requests[0].get_response_sender()]).start()
        def send(self, sender):
            while not sender.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("greeting", np.array([["x"]]))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self.cancelled.set()
    """
    with conch.testing.load(write(source, "model_transaction_policy { decoupled: true }")) as model:
        replies = model.stream(name="Ada")
        assert next(replies).texts("greeting") == ["x"]
        replies.close()  # type: ignore[attr-defined]
        assert model.python_model.cancelled.wait(30)


CALLING = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            name = pb_utils.get_input_tensor_by_name(request, "name")
            call = pb_utils.InferenceRequest(model_name="other", inputs=[name], requested_output_names=["length"])
            answer = call.exec()
            if answer.has_error():
                responses.append(pb_utils.InferenceResponse(error=answer.error()))
                continue
            length = pb_utils.get_output_tensor_by_name(answer, "length").as_numpy()
            output = np.array([[str(int(length[0, 0]))]])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("greeting", output)]))
        return responses
"""


def test_calls_of_other_models_are_answered_by_functions(write: Write) -> None:
    asked = []

    def other(name: np.ndarray[Any, Any]) -> dict[str, Any]:
        asked.append(name.tolist())
        return {"length": np.array([[len(name[0, 0])]], np.int32), "not wanted": ["x"]}

    with conch.testing.load(write(CALLING), models={"other": other}) as model:
        assert model(name="Ada").texts("greeting") == ["3"]
    assert asked == [[[b"Ada"]]]


def test_what_a_function_raises_is_an_error_of_its_response_or_the_tests(write: Write) -> None:
    def refusing(**inputs: Any) -> dict[str, Any]:
        raise ConchError("too long", Code.INVALID_ARG)

    def mistaken(**inputs: Any) -> dict[str, Any]:
        raise ZeroDivisionError("in the test")

    directory = write(CALLING)
    with conch.testing.load(directory, models={"other": refusing}) as model:
        with pytest.raises(ConchError, match="too long"):
            model(name="Ada")
    with conch.testing.load(directory, models={"other": mistaken}) as model:
        with pytest.raises(ZeroDivisionError, match="in the test"):
            model(name="Ada")
    with conch.testing.load(directory) as model:
        with pytest.raises(ConchError, match="Model 'other' is not ready"):
            model(name="Ada")


def test_a_loaded_model_may_stand_for_another(write: Write) -> None:
    """Each is a ``1.model`` and asks for the runtime of its own, also after it has called the other."""
    measuring = """
    class TritonPythonModel:
        def execute(self, requests):
            name = pb_utils.get_input_tensor_by_name(requests[0], "name").as_numpy()
            length = np.array([[len(name[0, 0]) + 100 * pb_utils.get_model_dir().endswith("other/1")]], np.int32)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("length", length)])]
    """
    config = BATCHED.replace('"greeting" data_type: TYPE_STRING', '"length" data_type: TYPE_INT32')
    calling = CALLING.replace("str(int(length[0, 0]))", "str(int(length[0, 0])) + pb_utils.get_model_dir()[-3:]")
    with conch.testing.load(write(measuring, name="other", config=config)) as other:
        with conch.testing.load(write(calling), models={"other": other}) as model:
            assert model(name="Ada").texts("greeting") == ["103m/1"]


def test_calls_work_as_in_the_toy_repository() -> None:
    """Synchronous, asynchronous, decoupled, and loading and unloading."""
    with (
        conch.testing.load(MAIN / "plus_one") as plus_one,
        conch.testing.load(MAIN / "repeat") as repeat,
        conch.testing.load(MAIN / "calling_async", models={"plus_one": plus_one, "repeat": repeat.stream}) as model,
    ):
        assert set(model(ones(model))) == set(model.signature.outputs)


def test_models_can_be_loaded_and_unloaded(write: Write) -> None:
    source = """
    class TritonPythonModel:
        def execute(self, requests):
            said = [pb_utils.is_model_ready("other")]
            pb_utils.unload_model("other")
            said.append(pb_utils.is_model_ready("other"))
            pb_utils.load_model("other")
            said.append(pb_utils.is_model_ready("other"))
            try:
                pb_utils.load_model("unknown")
            except pb_utils.TritonModelException as error:
                said.append("failed to poll" in str(error))
            return [pb_utils.InferenceResponse([pb_utils.Tensor("greeting", np.array([[str(said)]]))])]
    """
    with conch.testing.load(write(source), models={"other": lambda **inputs: {}}) as model:
        assert model(name="x").texts("greeting") == ["[True, False, True, True]"]


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
        gate.wait(10)
        from helper import SAID
        import c_python_backend_utils
        pb_utils.Logger.log_warn("careful")
        said = pb_utils.Tensor("name", np.array([[SAID]], np.object_))
        call = pb_utils.InferenceRequest(model_name="other", requested_output_names=["greeting"], inputs=[said])
        answer = pb_utils.get_output_tensor_by_name(call.exec(), "greeting")
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("greeting", answer.as_numpy())]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        ended.wait(10)
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
        assert events["logged"].wait(10)
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
    assert [(one.name, one.levelname, one.message) for one in caplog.records] == [
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
