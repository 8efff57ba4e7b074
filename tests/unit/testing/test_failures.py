"""What models raise, and responses that do not fit or never come."""

from __future__ import annotations

import traceback

import pytest

import conch.testing
from conch.core.errors import ConchError
from conch.testing import ModelRequest
from tests.unit.testing.models import Write

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
        (RESPONSE.replace("NAME", "'greeting'").replace("ARRAY", "np.zeros(1)"), "is FP64, but its .* declares BYTES"),
        (
            RESPONSE.replace("NAME", "'greeting'").replace("ARRAY", "np.array(['x'])"),
            r"has shape \[1\], but its configuration declares \[1,1\]",
        ),
    ],
)
def test_responses_that_do_not_fit_are_refused(write: Write, expression: str, message: str) -> None:
    with conch.testing.load(write(RETURNING.replace("EXPRESSION", expression))) as model:
        with pytest.raises(ConchError, match=message):
            model(name="Ada")


def test_a_response_that_never_comes_is_cancelled(write: Write) -> None:
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
        assert model.python_model.cancelled.wait(60)
