"""``conch request``: a body for ``curl --data-binary``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from conch.cli import main
from conch.cli.request import Input, body, request_command
from conch.core.errors import ConchError
from conch.core.tensors import split_bytes
from tests.unit.measure.perf.known_server import KnownServer, running

TEXT = Input("TEXT", (-1,))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text(
        'max_batch_size: 8 input { name: "N" data_type: TYPE_INT32 dims: 1 optional: true } '
        'input { name: "TEXT" data_type: TYPE_STRING dims: 1 }'
    )
    return tmp_path


def test_body_is_json_and_the_texts_behind_it() -> None:
    header, data = body("m", [TEXT], ["Grüße", 'a "b"\n'], {})

    (tensor,) = json.loads(header)["inputs"]
    assert (tensor["name"], tensor["datatype"], tensor["shape"]) == ("TEXT", "BYTES", [2])
    assert tensor["parameters"] == {"binary_data_size": len(data)}
    assert [element.decode() for element in split_bytes(data)] == ["Grüße", 'a "b"\n']


@pytest.mark.parametrize(
    ("dims", "count", "shape"),
    [((-1,), 3, [3]), ((-1, 1), 3, [3, 1]), ((-1, -1), 3, [3, 1]), ((1,), 1, [1]), ((1, -1), 2, [1, 2])],
)
def test_texts_take_the_shape_of_the_input(dims: tuple[int, ...], count: int, shape: list[int]) -> None:
    header, _ = body("m", [Input("TEXT", dims)], ["x"] * count, {})

    assert json.loads(header)["inputs"][0]["shape"] == shape


def test_name_of_the_model_is_escaped_in_the_url(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "m").rename(repository / "größter m")
    arguments = ["größter m", "x", "-r", str(repository), "-o", str(repository / "body")]
    request_command.main(arguments, standalone_mode=False)
    assert "/v2/models/gr%C3%B6%C3%9Fter%20m/infer " in capsys.readouterr().out


def test_texts_for_several_inputs_are_named() -> None:
    inputs = [Input("QUESTION", (-1,)), Input("CONTEXT", (-1,))]

    header, data = body("m", inputs, ["who?"], {"CONTEXT": ["somebody"]})

    assert [tensor["name"] for tensor in json.loads(header)["inputs"]] == ["QUESTION", "CONTEXT"]
    assert split_bytes(data) == [b"who?", b"somebody"]


@pytest.mark.parametrize(
    ("inputs", "texts", "named", "message"),
    [
        ([Input("T", (1,))], ["a", "b"], {}, r"'T' of shape \[1\] cannot hold 2 texts"),
        ([TEXT], [], {"OTHER": ["a"]}, "no input 'OTHER' that takes texts; it has TEXT"),
        ([TEXT], ["a"], {"TEXT": ["b"]}, "no input left for 'a'"),
        ([], ["a"], {}, "no input left for 'a'"),
        ([TEXT], [], {}, "at least one text"),
    ],
)
def test_request_that_cannot_be_is_refused(
    inputs: list[Input], texts: list[str], named: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(ConchError, match=message):
        body("m", inputs, texts, named)


def test_command_writes_the_body_and_prints_how_to_send_it(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "query_body.bin"

    done = CliRunner().invoke(request_command, ["m", "some text", "-r", str(repository), "-o", str(file)])

    assert done.exit_code == 0, done.output
    length = int(re.search(r"Inference-Header-Content-Length: (\d+)", done.output)[1])  # type: ignore[index]
    content = file.read_bytes()
    (tensor,) = json.loads(content[:length])["inputs"]
    assert tensor["shape"] == [1, 1]
    assert split_bytes(content[length:]) == [b"some text"]
    assert f"--data-binary @{file}" in done.output
    assert "http://localhost:8000/v2/models/m/infer" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none", "text"], "cannot be read: set --model-repository to the model's repository, or set --url"),
        (["../m", "text"], "must not contain path traversal characters"),
        (["m", "-i", "text"], "--input 'text' must be NAME=TEXT"),
        (["m", "text", "--url", "localhost:8000"], "must begin with http:// or https://"),
        (["m", "text", "--url", "http://127.0.0.1:9"], "does not describe the model's inputs"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], message: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["request", *arguments, "-r", str(repository)]) == 1

    assert message in capsys.readouterr().err


def test_configuration_without_inputs_asks_for_a_server(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "m" / "config.pbtxt").write_text('backend: "huggingface"')

    assert main(["request", "m", "text", "-r", str(repository)]) == 1

    assert "set --url to a server that runs the model" in capsys.readouterr().err


def test_inputs_come_from_the_metadata_of_a_running_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # no listener
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [1]}, {"name": "TEXT", "datatype": "BYTES", "shape": [-1, 1]}]
    file = tmp_path / "query_body.bin"

    with running(KnownServer(metadata={"name": "known", "inputs": inputs})) as server:
        url = f"http://127.0.0.1:{server.port}/"
        assert main(["request", "known", "a text", "--url", url, "-o", str(file)]) == 0

    assert f"curl -X POST {url}v2/models/known/infer" in capsys.readouterr().out
    assert b'"shape":[1,1]' in file.read_bytes()
