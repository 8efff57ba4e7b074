"""What a model's author sees at the terminal of ``conch serve``: prints, messages, tracebacks, and pdb's prompt."""

from __future__ import annotations

import re
import signal
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.raw import Reply, post, tensor
from tests.servers import ConchServer
from tests.terminal import Terminal

CONFIG = """\
backend: "python"
max_batch_size: 0
input { name: "IN" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""

TALKING = """
    import ctypes, logging, subprocess, sys, threading, warnings
    import numpy as np
    import triton_python_backend_utils as pb_utils

    def fail(word):
        raise ValueError(f"a word:\\n\\x1b[31m{word}")

    class TritonPythonModel:
        def execute(self, requests):
            word = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()[0].decode()
            if word == "fail":
                fail(word)
            print("printed", word)
            print("to stderr", word, file=sys.stderr)
            print("halves of", end=" ")
            print("a line")
            logging.getLogger("some.library").warning("logged %s", word)
            warnings.warn(f"warned of {word}")
            subprocess.run(["echo", "from a program"])
            ctypes.CDLL(None).printf(b"from C\\n")
            thread = threading.Thread(target=fail, args=[word], name="beside")
            thread.start()
            thread.join()
            pb_utils.Logger.log_info("by the logger")
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([word], np.object_))])]
"""

STOPPING = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            secret = 40 + 2
            breakpoint()
            answer = str(secret)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([answer], np.object_))])]

        def initialize(self, args):
            kind = pb_utils.MetricFamily.COUNTER
            self.family = pb_utils.MetricFamily(name="stops", description="of the debugger", kind=kind)
            self.stops = self.family.Metric(labels={"model": "stopping"})
            self.stops.increment(1)
            print("initialised with", self.stops.value())
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    sources = {
        "talking": TALKING,
        "stopping": STOPPING,
        "broken": "import os\nclass TritonPythonModel:\n    def execute(:\n",
        "uninitialised": "class TritonPythonModel:\n    def initialize(self, args):\n        {}['weights']\n",
    }
    for name, source in sources.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(CONFIG + "instance_group { count: 2 kind: KIND_CPU }\n")
        (repository / name / "1" / "model.py").write_text(textwrap.dedent(source))
    return repository


class At(Terminal):
    """A server at a terminal, with its address."""

    def __init__(self, server: ConchServer) -> None:
        super().__init__(server.command)
        self.http = server.http

    def ask(self, model: str, text: str) -> Reply:
        return post(self.http, f"/v2/models/{model}/infer", {"inputs": [tensor("IN", "BYTES", [text], [1])]})


@pytest.fixture(scope="module")
def terminal(repository: Path) -> Iterator[At]:
    with At(ConchServer(repository, "--exit-on-error=false", "--debug=stopping")) as terminal:
        terminal.read_until("model_control_mode")
        yield terminal


@pytest.mark.parametrize(
    ("level", "place", "text"),
    [
        ("I", "output:1", "printed Ada"),
        ("I", "output:2", "to stderr Ada"),
        ("I", "output:3", "halves of a line"),
        ("W", "model.py:18", "logged Ada"),
        ("W", "model.py:19", "UserWarning: warned of Ada"),
        ("I", "output:4", "from a program"),
        ("I", "output:5", "from C"),
        ("I", "model.py:25", "by the logger"),
    ],
)
def test_what_a_model_says_is_logged_with_its_name(terminal: At, level: str, place: str, text: str) -> None:
    if "printed Ada" not in terminal.screen:
        assert terminal.ask("talking", "Ada").status == 200
        # Output and log lines come on ways of their own.
        terminal.read_until("(?s)from C.*by the logger|by the logger.*from C")
    found = re.findall(r'^(\w)\d{4} [\d:.]+ \d+ talking_0_[01]/(\S+)\] "(.*)"$', terminal.screen, re.MULTILINE)
    assert (level, place, text) in found, terminal.screen


def test_traceback_has_its_lines_at_a_terminal(terminal: At, repository: Path) -> None:
    reply = terminal.ask("talking", "fail")
    path = repository / "talking" / "1" / "model.py"
    assert reply.error == (
        "Failed to process the request(s) for model 'talking_0_0', message: ValueError: a word:\n\x1b[31mfail\n\n"
        f"At:\n  {path}(7): fail\n  {path}(13): execute\n"
    ).replace("talking_0_0", re.findall("talking_0_[01]", reply.error)[0])
    shown = terminal.read_until(
        r"(?s)E\d{4} \S+ \d+ talking_0_[01]/model.py:13\] \"Failed to process the request\(s\) for model '\w+', "
        r'message: ValueError: a word:"\n(.*?raise ValueError.*?fail\n(?=[IEW]\d{4} |$))'
    )[1]
    assert shown == (
        "\\x1b[31mfail\n"
        "Traceback (most recent call last):\n"
        f'  File "{path}", line 13, in execute\n'
        "    fail(word)\n"
        f'  File "{path}", line 7, in fail\n'
        '    raise ValueError(f"a word:\\n\\x1b[31m{word}")\n'
        "ValueError: a word:\n"
        "\\x1b[31mfail\n"
    )


@pytest.mark.parametrize(
    "pattern",
    [
        # No response reports the end of a thread, so only the log does.
        r"model.py:7\] \"exception in thread 'beside'\"\nTraceback",
        r"""broken_0\S*/model.py:3\] "SyntaxError: invalid syntax \(model.py, line 3\)"
  File "\S+/broken/1/model.py", line 3
    def execute\(:
""",
        r"""uninitialised_0_[01]/model.py:3\] "KeyError: 'weights'"
Traceback \(most recent call last\):
  File "\S+/uninitialised/1/model.py", line 3, in initialize
    \{\}\['weights'\]
.*KeyError: 'weights'""",
    ],
    ids=["thread", "syntax", "initialize"],
)
def test_other_failures_are_reported_with_path_and_line(terminal: At, pattern: str) -> None:
    assert re.search(pattern, terminal.screen, re.DOTALL), terminal.screen


def test_debugged_model_is_ready_when_it_is_initialised(terminal: At) -> None:
    """A call that waits for the server, as those about metrics do, is answered while the model is loaded."""
    shown = terminal.screen
    assert shown.index("initialised with 1.0") < shown.index("model_control_mode")


@pytest.fixture
def asked(terminal: At, background: Callable[..., Future[Any]]) -> Future[Any]:
    """A request that has stopped at the breakpoint."""
    asked: Future[Any] = background(terminal.ask, "stopping", "x")
    terminal.read_until(r"model.py\(9\)execute\(\)\n-> answer = str\(secret\)\n\(Pdb\) ")
    return asked


def test_breakpoint_opens_a_prompt_at_the_terminal(terminal: At, asked: Future[Any]) -> None:
    terminal.type("p secret\n")
    terminal.read_until(r"p secret\n42\n\(Pdb\) ")
    terminal.type("secret = 7\nn\n")
    terminal.read_until(r"-> return .*\n\(Pdb\) ")
    terminal.type("c\n")
    assert asked.result().json()["outputs"][0]["data"] == ["7"]


def test_log_waits_while_a_prompt_is_open_and_other_models_continue(terminal: At, asked: Future[Any]) -> None:
    assert terminal.ask("talking", "Grace").status == 200
    terminal.type("p secret + 1\n")
    terminal.read_until(r"43\n\(Pdb\) ")
    assert "printed Grace" not in terminal.screen
    terminal.type("c\n")
    terminal.read_until("printed Grace")
    assert asked.result().status == 200


def test_quitting_the_debugger_fails_the_request_and_nothing_else(terminal: At, asked: Future[Any]) -> None:
    terminal.type("q\n")
    assert "BdbQuit" in asked.result().error
    assert terminal.ask("talking", "still there").status == 200


def test_ctrl_c_at_the_prompt_ends_the_server_and_leaves_the_terminal_as_it_was(
    terminal: At, asked: Future[Any]
) -> None:
    assert not terminal.echoes  # readline shows what is typed itself
    terminal.type("\x03")
    assert terminal.process.wait(60) in (0, 1)
    assert terminal.echoes
    assert isinstance(asked.exception(), Exception) or asked.result().status != 200


def test_debugging_a_model_that_does_not_exist_is_refused(repository: Path) -> None:
    command = ConchServer(repository, "--debug=stoping").command
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert f"there is no model 'stoping' in {repository}; did you mean 'stopping'?" in ended.stderr


def test_breakpoint_is_passed_over_without_debug(repository: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ("--model-control-mode=explicit", "--load-model=stopping")
    with ConchServer(repository, *flags, log=log) as server:
        body = {"inputs": [tensor("IN", "BYTES", ["x"], [1])]}
        assert post(server.http, "/v2/models/stopping/infer", body).json()["outputs"][0]["data"] == ["42"]
        server.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]
        server.process.wait(60)  # type: ignore[union-attr]
    assert re.search(r"W.* stopping_0_[01]/model.py:8\] \"breakpoint\(\) was skipped; .* --debug", log.read_text())
