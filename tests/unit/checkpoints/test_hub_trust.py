"""A checkpoint's folder does not vouch for itself: what its ``model.json`` may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from tests.unit.checkpoints.folders import checkpoint, refusal

WITH_CODE = {"model_type": "own", "auto_map": {"AutoModel": "own.Own"}}


def model_file(folder: Path, **values: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("value", [True, "true", "1", "Yes"])
def test_checkpoint_cannot_trust_its_own_code(tmp_path: Path, value: Any) -> None:
    folder = model_file(checkpoint(tmp_path / "1", WITH_CODE), trust_remote_code=value)
    message = refusal(folder)
    assert "needs the Python code of its checkpoint" in message
    assert f"'trust_remote_code' of {folder / 'model.json'} is ignored" in message


@pytest.mark.parametrize("model", [".", "inner", "../1", "$$TRITON_MODEL_DIRECTORY/1/inner"])
def test_naming_a_folder_of_its_own_is_no_way_around(tmp_path: Path, model: str) -> None:
    folder = model_file(tmp_path / "m" / "1", model=model, trust_remote_code=True)
    checkpoint(folder / "inner", WITH_CODE)
    (folder / "config.json").write_text(json.dumps({**WITH_CODE, "architectures": ["OwnModel"]}))
    if model in (".", "../1", "inner"):
        checkpoint(folder, WITH_CODE)
    assert "trust_remote_code" in refusal(folder) or "outside of it" in refusal(folder)


def test_folder_below_a_version_without_a_checkpoint_of_its_own_cannot_trust_itself(tmp_path: Path) -> None:
    folder = model_file(tmp_path / "1", model="inner", trust_remote_code=True)
    checkpoint(folder / "inner", WITH_CODE)
    assert "is ignored, because a checkpoint cannot vouch for its own code" in refusal(folder)


def test_warning_says_what_to_do_where_the_checkpoint_loads_without_its_code(tmp_path: Path) -> None:
    folder = model_file(checkpoint(tmp_path / "1"), trust_remote_code=True)
    opened = Checkpoint.open(folder)
    assert not opened.options.trust_remote_code
    assert "set parameter 'trust_remote_code' in config.pbtxt" in opened.warning


def test_what_is_not_trusted_needs_no_warning(tmp_path: Path) -> None:
    assert Checkpoint.open(model_file(checkpoint(tmp_path / "1"), trust_remote_code=False)).warning == ""


def test_configuration_is_obeyed_beside_a_checkpoint(tmp_path: Path) -> None:
    folder = model_file(checkpoint(tmp_path / "1", WITH_CODE), task="feature-extraction")
    assert Checkpoint.open(folder, Options.from_values({"trust_remote_code": "true"})).options.trust_remote_code


def test_model_file_that_stands_alone_is_obeyed(tmp_path: Path) -> None:
    folder = model_file(tmp_path / "m" / "1", model=str(tmp_path / "elsewhere"), trust_remote_code=True)
    checkpoint(tmp_path / "elsewhere", WITH_CODE)
    opened = Checkpoint.open(folder)
    assert opened.options.trust_remote_code
    assert opened.warning == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "/etc"),
        ("model", "../../other"),
        ("chat_template", "/etc/passwd"),
        ("chat_template", "notes.txt"),
        ("cache_dir", "~/.cache"),
        ("speculative_model", "$$TRITON_MODEL_DIRECTORY/draft"),
        ("mmproj", "/etc/passwd"),
        ("token_ids", "../../other/tokenizer.json"),
        ("lora_modules", {"one": "../adapter"}),
        ("lora_modules", '{"one": "/adapter"}'),
    ],
)
def test_model_file_of_a_checkpoint_names_no_files_outside_of_it(tmp_path: Path, name: str, value: Any) -> None:
    folder = model_file(checkpoint(tmp_path / "m" / "1"), **{name: value})
    (tmp_path / "m" / "notes.txt").write_text("not the checkpoint's")
    (tmp_path / "other").mkdir()
    assert refusal(folder).endswith(f": set parameter '{name}' in config.pbtxt")


def test_model_file_of_a_checkpoint_may_name_its_files(tmp_path: Path) -> None:
    folder = model_file(checkpoint(tmp_path / "1", template__jinja="{{ messages }}"), chat_template="template.jinja")
    assert Checkpoint.open(folder).options.text("chat_template") == "template.jinja"


def test_weights_in_one_file_are_a_checkpoint_as_well(tmp_path: Path) -> None:
    folder = model_file(tmp_path / "1", chat_template="/etc/passwd")
    (folder / "model.gguf").touch()
    assert "may not name a file or folder outside of it" in refusal(folder)
