"""Tiny checkpoints of any architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from benchmarks.day_zero.checkpoints import TASKS, Architecture, CannotMake, architectures, write
from benchmarks.day_zero.sizes import VOCABULARY, shrink


def config_of(kind: str) -> Any:
    return shrink(transformers.CONFIG_MAPPING[kind])


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_architectures(task: str) -> None:
    assert len(architectures(task)) > 10


def test_one_layer_of_each_kind_is_left() -> None:
    config = config_of("gemma3_text")
    assert sorted(set(config.layer_types)) == ["full_attention", "sliding_attention"]
    assert config.num_hidden_layers == len(config.layer_types) == 2


def test_layers_keep_what_they_have_of_their_own() -> None:
    config = config_of("gemma4_text")
    assert [layer.head_dim for layer in config.per_layer_config] == [8, 16]


def test_grouped_heads_stay_grouped_and_others_do_not_become_so() -> None:
    assert config_of("llama").num_key_value_heads == config_of("llama").num_attention_heads
    assert config_of("mistral").num_key_value_heads < config_of("mistral").num_attention_heads


@pytest.mark.parametrize(
    "architecture",
    [
        Architecture("causal", "jamba", "JambaForCausalLM"),
        Architecture("seq2seq", "t5", "T5ForConditionalGeneration"),
        Architecture("sequence-classification", "bert", "BertForSequenceClassification"),
        Architecture("image-classification", "vit", "ViTForImageClassification"),
        Architecture("audio-classification", "wav2vec2", "Wav2Vec2ForSequenceClassification"),
    ],
    ids=lambda architecture: architecture.kind,
)
def test_a_checkpoint_loads_with_all_of_its_weights(tmp_path: Path, architecture: Architecture) -> None:
    write(tmp_path, architecture)
    model_class = getattr(transformers, architecture.name)
    model, report = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert model.config.architectures == [architecture.name]
    if not architecture.task.startswith(("image", "audio")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert 0 < max(tokenizer("How can you be sure?")["input_ids"]) < VOCABULARY


def test_the_same_seed_makes_the_same_weights(tmp_path: Path) -> None:
    architecture = Architecture("causal", "gpt2", "GPT2LMHeadModel")
    for name in ("one", "two"):
        write(tmp_path / name, architecture, seed=3)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_an_architecture_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(CannotMake, match="million parameters"):
        write(tmp_path, Architecture("masked", "perceiver", "PerceiverForMaskedLM"))
