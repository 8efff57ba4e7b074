"""The tasks of GGUF files, and the files and engines that a task refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import Code, ConchError
from tests.unit.checkpoints.gguf_files import LAST, MEAN, RANK, write


def opened(folder: Path, architecture: str, *tensors: tuple[str, tuple[int, ...]], **given: Any) -> Checkpoint:
    """Open a file of an architecture with these keys; those that begin with a capital are options."""
    options = {name.lower(): value for name, value in given.items() if name[0].isupper()}
    sizes = {"context_length": 64, "embedding_length": 32, "block_count": 1}
    keys = {**sizes, **{name: value for name, value in given.items() if name[0].islower()}}
    shapes = [("token_embd.weight", (32, 8)), *tensors]
    end, infos = 0, []
    for name, shape in shapes:
        infos.append((name, shape, 0, end))
        end += -(-4 * shape[0] * (shape[1] if len(shape) > 1 else 1) // 32) * 32
    metadata = {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "bert",
        **{f"{architecture}.{name.replace('__', '.')}": value for name, value in keys.items()},
    }
    write(folder / "m.gguf", metadata, tensors=infos, data=end)
    return Checkpoint.open(folder, Options.from_values(options))


@pytest.mark.parametrize(
    ("architecture", "keys", "tensors", "task"),
    [
        ("bert", {}, (), "feature-extraction"),
        ("nomic-bert", {"pooling_type": MEAN}, (), "feature-extraction"),
        ("gemma-embedding", {}, (), "feature-extraction"),
        ("qwen3vl", {"pooling_type": LAST}, (), "feature-extraction"),
        ("qwen3vl", {"pooling_type": RANK}, (), "text-ranking"),
        ("bert", {"pooling_type": MEAN}, (("cls.output.weight", (32,)),), "text-ranking"),
        ("qwen3vl", {}, (), "text-generation"),
    ],
)
def test_task_follows_from_the_file(
    tmp_path: Path, architecture: str, keys: dict[str, int], tensors: tuple[Any, ...], task: str
) -> None:
    checkpoint = opened(tmp_path, architecture, *tensors, **keys)
    assert checkpoint.task == task
    if task != "text-generation":
        assert checkpoint.engine == "llamacpp"
        assert checkpoint.config["hidden_size"] == 32


def test_size_of_vectors_is_that_after_the_projections(tmp_path: Path) -> None:
    layers = (("dense_2.weight", (32, 48)), ("dense_3.weight", (48, 16)))
    assert opened(tmp_path, "gemma-embedding", *layers).config["hidden_size"] == 16


def test_classes_of_a_reranker_have_the_labels_of_the_file(tmp_path: Path) -> None:
    labels = {"classifier__output_labels": ["no", "yes", "maybe"]}
    assert opened(tmp_path, "bert", pooling_type=RANK, **labels).labels == ["no", "yes", "maybe"]
    assert opened(tmp_path, "qwen3vl", pooling_type=RANK, classifier__output_labels=["yes", "no"]).labels is None


@pytest.mark.parametrize(
    ("architecture", "given", "message"),
    [
        ("bert", {"Task": "text-generation"}, "is for task 'feature-extraction', not for 'text-generation'"),
        ("bert", {"Task": "text-ranking"}, "is for task 'feature-extraction', not for 'text-ranking'"),
        (
            "bert",
            {"Task": "feature-extraction", "pooling_type": RANK},
            "is for task 'text-ranking', not for 'feature-extraction'",
        ),
        (
            "bert",
            {"Engine": "openvino"},
            "engine 'openvino' does not run task 'feature-extraction' of a GGUF file: choose llamacpp",
        ),
        (
            "bert",
            {"Lora_modules": '{"red": "red.gguf"}'},
            "LoRA adapters are for task 'text-generation', and the task is 'feature-extraction'",
        ),
        (
            "bert",
            {"Lora_modules": '{"red": "red"}'},
            "LoRA adapters are for task 'text-generation', and the task is 'feature-extraction'",
        ),
        ("lfm2", {"Task": "fill-mask"}, "is for task 'text-generation', not for 'fill-mask'"),
    ],
)
def test_other_tasks_and_engines_are_refused(
    tmp_path: Path, architecture: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConchError) as refused:
        opened(tmp_path, architecture, **given)
    assert refused.value.code is Code.INVALID_ARG
    assert message in refused.value.message


def test_reranker_that_needs_token_types_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=r"by token types, which llama\.cpp does not support"):
        opened(tmp_path, "bert", ("token_types.weight", (32, 2)), pooling_type=RANK)
    assert opened(tmp_path, "bert", ("token_types.weight", (32, 2)), pooling_type=MEAN).task == "feature-extraction"
