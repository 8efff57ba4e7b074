"""Speculative decoding at load: contradictory parameters, and draft models of another vocabulary, are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from conch.backends.generation.draft import draft_spec
from conch.backends.generation.engine import EngineSpec
from conch.backends.generation.options import engine_spec
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.checkpoints.tokenizers.open import open_tokenizer
from tests.refusals import refused_argument
from tests.unit.checkpoints.folders import checkpoint
from tests.unit.checkpoints.gguf_files import TOKENS, write_model
from tests.unit.checkpoints.tokenizers.tokenizers_made import byte_level, metaspace

CPU = {"kind": "CPU", "device_id": 0}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 500}
BYTE_LEVEL: dict[str, Any] = json.loads(byte_level().to_str())


def swapped() -> dict[str, Any]:
    """The same tokens with two ids exchanged."""
    made = json.loads(byte_level().to_str())
    vocabulary = made["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    return {**made, "model": {**made["model"], "vocab": vocabulary}}


def draft_of(folder: Path, name: str = "draft") -> Path | None:
    """Load the model in ``folder`` with a draft model, as a worker does."""
    opened = Checkpoint.open(folder / "model", Options.from_values({"speculative_model": name}))
    return engine_spec(opened, CPU, open_tokenizer(opened)).draft


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint(tmp_path / "model", CONFIG, tokenizer__json=BYTE_LEVEL)
    return tmp_path


def test_draft_model_with_the_same_tokens_is_accepted(folder: Path) -> None:
    # The number of logits may be padded differently.
    checkpoint(folder / "draft", {**CONFIG, "vocab_size": 512}, tokenizer__json=BYTE_LEVEL)
    assert draft_of(folder) == folder / "draft"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer__json": json.loads(metaspace().to_str())},
            r"the vocabulary of the draft model .* differs from the model's: \d+ tokens, and",
        ),
        ({"tokenizer__json": swapped()}, r"differs from the model's: token \d+ is '.*', and '.*' in the"),
        ({"tokenizer__json": None, "config": {**CONFIG, "vocab_size": 499}}, "499 tokens, and the model has 500"),
        ({"config__json": None}, "the draft model .* lacks config.json"),
    ],
    ids=["another number of tokens", "other ids", "heads of another size", "no model"],
)
def test_draft_model_of_another_vocabulary_is_refused(folder: Path, files: dict[str, Any], message: str) -> None:
    checkpoint(folder / "draft", **{"config": CONFIG, **files})
    refused = refused_argument(draft_of, folder)
    assert re.search(f"^parameter 'speculative_model': .*{message}", refused), refused


def test_draft_model_in_a_gguf_file_has_the_tokens_of_the_file(folder: Path) -> None:
    write_model(folder / "draft" / "m.gguf", TOKENS)
    assert "differs from the model's: 8 tokens, and" in refused_argument(draft_of, folder)


def test_heads_without_a_tokenizer_are_accepted_by_their_size(folder: Path) -> None:
    checkpoint(folder / "draft", CONFIG, tokenizer__json=None)
    assert draft_of(folder) == folder / "draft"


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({}, ""),
        ({"speculative_method": "ngram"}, "ngram"),
        ({"speculative_model": "draft"}, "draft_model"),
        ({"speculative_model": "draft", "speculative_method": "draft_model"}, "draft_model"),
    ],
)
def test_a_draft_model_is_used_unless_another_method_is_named(
    folder: Path, options: dict[str, str], method: str
) -> None:
    checkpoint(folder / "draft", CONFIG, tokenizer__json=BYTE_LEVEL)
    opened = Checkpoint.open(folder / "model", Options.from_values(options))
    assert engine_spec(opened, CPU, open_tokenizer(opened)).speculative == method


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_method": "eagle"}, "'speculative_method' is 'eagle'; it must be one of draft_model, ngram"),
        ({"speculative_method": "draft_model"}, "'speculative_model' names no model"),
        ({"speculative_method": "ngram", "speculative_model": "draft"}, "needs no 'speculative_model'"),
    ],
)
def test_contradictory_methods_are_refused(folder: Path, options: dict[str, str], message: str) -> None:
    opened = Checkpoint.open(folder / "model", Options.from_values(options))
    assert message in refused_argument(engine_spec, opened, CPU, None)


def test_heads_are_refused_by_engines_that_take_draft_models(folder: Path) -> None:
    heads = {**CONFIG, "architectures": ["LlamaForCausalLMEagle3"]}
    checkpoint(folder / "draft", heads, tokenizer__json=None)
    spec = EngineSpec(folder / "model", CONFIG, (2,), speculative="draft_model", draft=folder / "draft")
    assert "supports draft models, but no heads such as 'LlamaForCausalLMEagle3' of" in refused_argument(
        draft_spec, spec, "openvino"
    )
