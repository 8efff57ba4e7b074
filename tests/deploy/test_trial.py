"""``conch deploy`` serves what it has written and sends the request, before it says that the model answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.cli import main
from conch.repository.checks import checkpoints
from tests.deploy.clouds import MODEL, PREPROCESSING, repository
from tests.models import write

ANSWERED = "The artifact, served here as on the platform, answered request.json with\n"
INFERRED = '"outputs":[{"name":"text_output","datatype":"BYTES","shape":[1],"data":["WHAT IS A CONCH?"]}]}'
GENERATED = '"text_output":"WHAT IS A CONCH?"}'
STREAMED = 'data: {"model_name":"ensemble"'


def run(platform: str, folder: Path, *options: str) -> int:
    return main(["deploy", platform, f"--model-repository={folder / 'models'}", f"--output={folder / 'out'}", *options])


@pytest.mark.parametrize(
    ("platform", "options", "answer"),
    [
        ("oci", [], INFERRED),
        ("oci", ["--endpoint=generate"], GENERATED),
        ("sagemaker", [], INFERRED),
        ("sagemaker", ["--endpoint=generate_stream"], STREAMED),
        ("vertex", [], INFERRED),
        ("vertex", ["--from-bucket", "--endpoint=generate"], GENERATED),
    ],
)
def test_the_answer_of_the_artifact_is_shown(
    platform: str, options: list[str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository(tmp_path / "models")
    assert run(platform, tmp_path, *options) == 0
    _, told, shown = capsys.readouterr().out.partition(ANSWERED)
    assert told and answer in shown


def test_one_model_of_several_answers_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "other"):
        write(tmp_path / "models", name, PREPROCESSING, {"1/model.py": MODEL})
    assert run("sagemaker", tmp_path, "--multi-model", "--model=other") == 0
    assert f'{ANSWERED}{{"model_name":"other"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (MODEL.replace(".upper()", ".shout()"), "the response to request.json has status 500: "),
        (MODEL + "    def initialize(self, args):\n        raise ValueError('no shell')\n",
         "conch serve has ended with status 1:\n"),
    ],
    ids=["request", "load"],
)  # fmt: skip
def test_an_artifact_that_does_not_answer_is_not_written(
    source: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "models", "m", PREPROCESSING, {"1/model.py": source})
    assert run("oci", tmp_path) == 1
    error = capsys.readouterr().err
    assert "served here as on the platform, " + told in error
    assert "no shell" in error or "no attribute 'shout'" in error
    assert "With --no-verify, the artifact is written without this request." in error
    assert not (tmp_path / "out").exists()


def test_request_is_not_sent_where_the_engine_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoints, "is_installed", lambda module: False)
    tensor = '{ name: "x" data_type: TYPE_FP32 dims: [1] }'
    write(tmp_path / "models", "m", f'backend: "onnxruntime"\ninput {tensor}\noutput {tensor}', {"1/model.onnx": ""})
    assert run("oci", tmp_path) == 0
    assert "request.json was not sent: engine 'onnxruntime' is not installed here (" in capsys.readouterr().out
    assert (tmp_path / "out" / "request.json").exists()


def test_request_is_not_sent_where_the_model_needs_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("conch.deploy.requirements.visible_gpus", lambda: ())
    write(tmp_path / "models", "m", PREPROCESSING + "instance_group { kind: KIND_GPU }", {"1/model.py": MODEL})
    assert run("vertex", tmp_path) == 0
    assert "request.json was not sent: model 'm' runs on a GPU, but this machine has none" in capsys.readouterr().out
