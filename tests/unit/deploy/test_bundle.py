"""A whole command: what it tells, and that bad input leaves nothing behind."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from conch.cli import main
from conch.deploy import oci
from tests.models import write

PYTHON = """
backend: "python"
input { name: "A" data_type: TYPE_FP32 dims: [1] }
output { name: "B" data_type: TYPE_FP32 dims: [1] }
"""
MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(Path("models"), "my_model", PYTHON, {"1/model.py": MODEL, ".hidden": ""})
    return Path("models")


def run(platform: str, *options: str) -> int:
    return main(["deploy", platform, "--no-verify", "--model-repository", "models", "--output", "out", *options])


def test_what_was_written_is_reported_with_sizes_and_what_was_left_out(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("oci") == 0
    size = Path("out/artifact.zip").stat().st_size
    assert capsys.readouterr().out == (
        "left out: my_model/.hidden\n"
        f"wrote out/artifact.zip ({size} bytes)\n"
        "wrote out/request.json\nwrote out/README.md\nwrote out/container/Containerfile\n"
        "wrote out/terraform/main.tf\nwrote out/terraform/variables.tf\n"
        "\nrequest.json was not sent: --no-verify\n"
        "\nRequests go to the model 'my_model'. The steps are in out/README.md.\n"
    )
    assert Path("out/README.md").read_text().startswith("# conch-my-model on OCI Data Science\n")


@pytest.mark.parametrize("platform", ["oci", "sagemaker", "vertex"])
def test_the_same_repository_gives_the_same_files(platform: str, models: Path) -> None:
    assert run(platform) == 0
    Path("out").rename("first")
    assert run(platform) == 0
    files = sorted(path.relative_to("out") for path in Path("out").rglob("*") if path.is_file())
    assert files == sorted(path.relative_to("first") for path in Path("first").rglob("*") if path.is_file())
    assert [("out" / path).read_bytes() for path in files] == [("first" / path).read_bytes() for path in files]


@pytest.mark.parametrize(
    "options",
    [
        ["oci", "--endpoint=openai"],
        ["sagemaker"],
        ["sagemaker", "--multi-model"],
        ["vertex", "--endpoint=generate"],
        ["vertex", "--from-bucket"],
    ],
)
def test_the_steps_can_be_pasted_into_a_shell(options: list[str], models: Path) -> None:
    """Each block is valid, and a server that one starts does not keep the next command waiting."""
    assert run(*options) == 0
    blocks = re.findall(r"```sh\n(.*?)```", Path("out/README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        checked = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, ""), block
        for started in re.findall(r"^docker run .*", block, re.MULTILINE):
            assert "--detach" in started.split() and "docker stop" in block


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--model=other"], "there is no model 'other' in the repository, which has my_model"),
        (
            ["--name=my model"],
            "--name must be letters, digits and single dashes between them, at most 63 characters; got",
        ),
        (["--name=" + "a" * 64], "at most 63 characters"),
        (["--output=models/out"], "models/out is in the model repository"),
        (["--output=gone/out"], "gone/out cannot be written: no such folder"),
        (["--model-repository=gone"], "gone does not exist"),
        (["--endpoint=chat"], "Invalid value for '--endpoint': 'chat' is not one of"),
    ],
)
@pytest.mark.parametrize("platform", ["oci", "sagemaker", "vertex"])
def test_bad_input_is_reported_in_one_sentence_and_nothing_remains(
    platform: str, options: list[str], complaint: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(platform, *options) == 1
    output = capsys.readouterr()
    assert complaint in output.err and output.err.count("\n") == 1 and output.out == ""
    assert [path.name for path in Path().iterdir()] == ["models"]


def test_an_artifact_above_the_limit_leaves_nothing(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(oci, "LIMIT", 10)
    assert run("oci") == 1
    assert "but OCI's model catalog accepts at most 10 bytes" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["models"]


def test_a_folder_with_files_is_left_as_it_is(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/mine").touch()
    assert run("vertex") == 1
    assert capsys.readouterr().err == "out exists and is not empty: choose another folder\n"
    assert [path.name for path in Path("out").iterdir()] == ["mine"]


def test_an_unknown_platform_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "sagemakr"]) == 1
    assert "did you mean 'sagemaker'?" in capsys.readouterr().err


@pytest.mark.parametrize("platform", ["oci", "vertex"])
def test_openai_for_an_embedding_model_is_its_embeddings(platform: str, models: Path) -> None:
    write(models, "embeds", 'backend: "huggingface" parameters { key: "model" value { string_value: "org/embeds" } }',
          {"1/model.json": '{"task": "sentence-similarity"}'})  # fmt: skip
    assert run(platform, "--endpoint=openai", "--model=embeds") == 0
    assert json.loads(Path("out/request.json").read_text()) == {"model": "embeds", "input": ["What is a conch?"]}
    assert "the model `embeds` at `/v1/embeddings`" in Path("out/README.md").read_text()


def test_openai_for_a_task_that_its_api_does_not_have_is_refused(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(models, "ranks", 'backend: "huggingface" parameters { key: "model" value { string_value: "org/ranks" } }',
          {"1/model.json": '{"task": "text-ranking"}'})  # fmt: skip
    assert run("oci", "--endpoint=openai", "--model=ranks") != 0
    assert "no endpoint for the task 'text-ranking' of model 'ranks'" in capsys.readouterr().err
    assert not Path("out").exists()
