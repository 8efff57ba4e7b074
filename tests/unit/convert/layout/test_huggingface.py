"""The files of the model that conch serves."""

from __future__ import annotations

from pathlib import Path

from conch.checkpoints.folder import Checkpoint
from conch.config import pbtxt
from conch.convert.layout import checkpoint_files, huggingface_config, quoted


def test_files_of_a_checkpoint_are_tokenizer_configuration_modules_and_one_kind_of_weights(
    checkpoint: Checkpoint,
) -> None:
    names = {path.as_posix() for path in checkpoint_files(checkpoint, weights=True)}

    assert {"config.json", "tokenizer.json", "1_Pooling/config.json", "model.safetensors"} <= names
    assert not names & {"pytorch_model.bin", "model.onnx", "conch.json", "code.py"}
    assert "model.safetensors" not in map(str, checkpoint_files(checkpoint, weights=False))
    assert Path("code.py") in checkpoint_files(checkpoint, weights=False, code=True)


def test_texts_in_a_configuration_are_quoted() -> None:
    config = pbtxt.parse(huggingface_config({"task": 'a "b" \\ \n c'}), "x")

    assert config.parameters["task"].string_value == 'a "b" \\ \n c'
    assert quoted("x") == '"x"'
