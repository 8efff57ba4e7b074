"""Task options that a configuration gives and no request could use: the model is not loaded."""

from pathlib import Path
from typing import Any

import pytest

from conch.backends.tasks.huggingface_backend import describe_task
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import Code, ConchError
from tests.text_checkpoints import open_task, write

CLASSES: dict[str, Any] = {
    "id2label": {0: "entailment", 1: "contradiction"},
    "label2id": {"entailment": 0, "contradiction": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bert"), "AutoModelForSequenceClassification", **CLASSES)


@pytest.mark.parametrize(
    ("task", "name", "value", "message"),
    [
        ("text-classification", "function_to_apply", "tanh", "function_to_apply is 'tanh'; it must be one of sigmoid"),
        ("text-classification", "top_k", "-1", "parameter 'top_k' is '-1'"),
        ("text-ranking", "function_to_apply", "relu", "function_to_apply is 'relu'; it must be one of sigmoid"),
        ("token-classification", "aggregation_strategy", "best", "aggregation_strategy is 'best'; it must be one of"),
        (
            "zero-shot-classification",
            "hypothesis_template",
            "About",
            "hypothesis_template is 'About'; it must have one",
        ),
        ("zero-shot-classification", "multi_label", "perhaps", "parameter 'multi_label' is 'perhaps'; it must be true"),
        ("question-answering", "max_answer_len", "0", "max_answer_len is 0; it must be at least 1"),
        ("question-answering", "doc_stride", "few", "parameter 'doc_stride' is 'few'"),
        ("question-answering", "handle_impossible_answer", "2", "parameter 'handle_impossible_answer' is '2'"),
    ],
)
def test_options_that_cannot_work_are_refused_before_weights_are_read(
    folder: Path, task: str, name: str, value: str, message: str
) -> None:
    with pytest.raises(ConchError, match=message) as error:
        describe_task(Checkpoint.open(folder, Options.from_values({"task": task, name: value})))
    assert error.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("task", ["text-ranking", "zero-shot-classification", "question-answering"])
def test_a_maximum_that_leaves_no_room_for_a_pair_is_refused(tmp_path: Path, folder: Path, task: str) -> None:
    if task == "question-answering":
        folder = write(tmp_path, "AutoModelForQuestionAnswering")
    with pytest.raises(ConchError, match="3 special tokens around a pair of texts, so it must be at least 5"):
        open_task(folder, task, max_length=4)


def test_windows_that_hold_no_pair_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "AutoModelForQuestionAnswering")
    with pytest.raises(ConchError, match="parameter 'max_seq_len' is 4; a question with a context needs at least 5"):
        open_task(folder, "question-answering", max_seq_len=4)
