"""A folder of sentence-transformers is never served as another task: what is not served is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.backends.tasks.huggingface_backend import describe_task
from conch.checkpoints.folder import Checkpoint
from conch.core.errors import ConchError
from tests.text_checkpoints import write

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}


def modules(folder: Path, *listed: dict[str, Any], head: str = "AutoModel") -> Path:
    (write(folder, head) / "modules.json").write_text(json.dumps(listed))
    return folder


@pytest.mark.parametrize(
    ("reference", "refusal"),
    [
        ("sentence_transformers.models.LSTM", "the sentence-transformers module 'LSTM', which is not supported"),
        ("custom_st.Reader", "the module 'custom_st.Reader', which is not a class of sentence-transformers"),
        ("os.system", "the module 'os.system', which is not a class of sentence-transformers"),
    ],
)
@pytest.mark.parametrize("head", ["AutoModelForMaskedLM", "AutoModelForSequenceClassification"])
def test_a_module_that_is_not_served_is_named(tmp_path: Path, head: str, reference: str, refusal: str) -> None:
    folder = modules(tmp_path, TRANSFORMER, {"path": "1_Module", "type": reference}, head=head)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.task == "feature-extraction"
    with pytest.raises(ConchError, match=refusal):
        describe_task(checkpoint)


@pytest.mark.parametrize("path", ["../1_Pooling", "/tmp", "a/../../b", "C:\\\\a", None])
def test_a_module_outside_the_folder_is_refused(tmp_path: Path, path: str | None) -> None:
    folder = modules(tmp_path, TRANSFORMER, {"path": path, "type": "sentence_transformers.models.Pooling"})
    with pytest.raises(ConchError, match="a folder of the checkpoint per module"):
        describe_task(Checkpoint.open(folder))


def test_a_feature_that_no_module_gives_is_refused(tmp_path: Path) -> None:
    folder = modules(tmp_path, TRANSFORMER, {"path": "1_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "1_Dense").mkdir()
    (folder / "1_Dense" / "config.json").write_text(json.dumps({"in_features": 32, "out_features": 3}))
    with pytest.raises(
        ConchError, match="the module 'Dense' reads sentence_embedding, which no module before it gives"
    ):
        describe_task(Checkpoint.open(folder))


def test_chat_messages_and_other_networks_are_refused(tmp_path: Path) -> None:
    folder = modules(tmp_path, TRANSFORMER, {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    output = {"method": "forward", "method_output_name": "last_hidden_state"}
    config = {"modality_config": {"text": output, "message": output}, "module_output_name": "token_embeddings"}
    (folder / "sentence_bert_config.json").write_text(json.dumps(config))
    with pytest.raises(ConchError, match="reads texts as chat messages, which is not supported"):
        describe_task(Checkpoint.open(folder))
