"""Dense models answer as sentence-transformers does over the same folder, alone and among neighbours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling, WeightedLayerPooling
from torch import nn
from transformers import Qwen2Config, Qwen2Model

from conch.backends.tasks.huggingface_backend import describe_task
from conch.backends.tasks.task import ExecutionWork
from conch.checkpoints.folder import Checkpoint
from conch.core.errors import ConchError
from tests.retrieval_models import (
    NEIGHBOURS,
    SIZE,
    backbone,
    close,
    completed,
    dense,
    each,
    embed,
    pooled,
    saved,
    vectors,
)
from tests.task_requests import open_model
from tests.text_checkpoints import byte_level, request

PROMPTS = {"query": "the station: ", "passage": "a bus ", "empty": ""}
MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


def check(folder: Path, **options: Any) -> None:
    """Compare the three ways to encode: alone, as one request, and as requests that run together."""
    reference, task = SentenceTransformer(str(folder), device="cpu"), open_model(folder, **options)
    for encode, inputs in (
        (reference.encode, {}),
        (reference.encode_query, {"task": "query"}),
        (reference.encode_document, {"task": "document"}),
    ):
        expected = np.stack([encode(text) for text in NEIGHBOURS])
        close(vectors(each(task, NEIGHBOURS, **inputs)), expected)
        close(vectors(embed(task, NEIGHBOURS, **inputs)), expected)
        close(vectors(embed(task, NEIGHBOURS[:1], **inputs)), expected[:1])


@pytest.mark.parametrize("include_prompt", [True, False])
def test_poolings(tmp_path: Path, include_prompt: bool) -> None:
    first = backbone(tmp_path / "backbone")
    for mode in (*MODES, ("cls", "max", "weightedmean")):
        pooling = Pooling(SIZE, mode, include_prompt=include_prompt)
        check(saved(tmp_path / str(mode), first, pooling, prompts=PROMPTS, default_prompt_name="passage"))


def test_truncation_on_the_left_removes_the_prompt_that_is_not_pooled(tmp_path: Path) -> None:
    pooling = Pooling(SIZE, include_prompt=False)
    task: Any = open_model(saved(tmp_path / "folder", backbone(tmp_path / "backbone"), pooling, prompts=PROMPTS))
    prompt = len(task.tokenizer.encode(PROMPTS["query"])) - 2
    text = len(task.tokenizer.encode("a bus in the morning")) - 2

    def prompt_tokens(**parameters: Any) -> int:
        asked = request(text_input=["a bus in the morning"], task=["query"])
        asked.parameters = parameters
        prepared = task.prepare(asked)
        return int(prepared.state.of(prepared.sequences[0]))

    assert prompt_tokens() == prompt_tokens(truncation="left") == prompt + 1
    assert prompt_tokens(truncation="left", max_length=prompt + text) == prompt - 1
    assert prompt_tokens(truncation="left", max_length=text + 1) == 1
    assert prompt_tokens(truncation="right", max_length=prompt + 3) == prompt + 1
    with pytest.raises(ConchError, match=f"a maximum of {prompt + 2} tokens leaves only the prompt of row 0"):
        prompt_tokens(truncation="right", max_length=prompt + 2)


def test_modules_after_pooling(tmp_path: Path) -> None:
    norm = LayerNorm(SIZE)
    nn.init.normal_(norm.norm.weight)
    nn.init.normal_(norm.norm.bias)
    residual = dense(nn.SiLU(), use_residual=True)
    check(pooled(tmp_path / "folder", Dropout(0.5), norm, dense(nn.GELU(), SIZE, use_residual=True), residual))


def test_dense_reads_and_writes_any_feature(tmp_path: Path) -> None:
    first = backbone(tmp_path / "backbone")
    tokens = dense(nn.ReLU(), SIZE, module_input_name="token_embeddings")
    renamed = dense(nn.Identity(), SIZE, module_output_name="other")
    back = dense(nn.Tanh(), 7, module_input_name="other", module_output_name="sentence_embedding")
    check(saved(tmp_path / "folder", first, tokens, Pooling(SIZE), renamed, back, Normalize()))


def test_an_activation_that_is_not_of_torch_is_refused_by_name(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "folder", dense(nn.Tanh()))
    for name in ("torch.nn.modules.activation.GLU", "my.module.Tanh"):
        path = folder / "2_Dense" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "activation_function": name}))
        with pytest.raises(ConchError, match=f"the activation '{name}'"):
            open_model(folder)


def test_an_activation_with_one_learned_slope(tmp_path: Path) -> None:
    check(pooled(tmp_path / "folder", dense(nn.PReLU(init=-0.7))))


def test_an_activation_with_several_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConchError, match=r"PReLU', whose weights are learned"):
        open_model(pooled(tmp_path / "folder", dense(nn.PReLU(5))))


@pytest.mark.parametrize("layers", [True, False])
def test_weighted_layers(tmp_path: Path, layers: bool) -> None:
    first = backbone(tmp_path / "backbone", num_hidden_layers=4, output_hidden_states=layers)
    weighted = WeightedLayerPooling(SIZE, num_hidden_layers=4, layer_start=2)
    nn.init.uniform_(weighted.layer_weights, 0.5, 1.5)
    check(saved(tmp_path / "folder", first, weighted, Pooling(SIZE)))


def test_truncation_and_options(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "folder", dense(nn.Tanh(), 12), Normalize(), truncate_dim=5)
    check(folder)
    assert describe_task(Checkpoint.open(folder)).outputs[0].dims == (5,)
    lengths = np.linalg.norm(vectors(embed(open_model(folder, normalize="true"), NEIGHBOURS)), axis=1)
    close(lengths, np.ones(len(NEIGHBOURS)))


def test_texts_are_lowercased_by_the_tokenizer(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "folder")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {**tokenizer["normalizer"], "lowercase": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "do_lower_case": False}))
    path = folder / "sentence_bert_config.json"
    path.write_text(json.dumps({"max_seq_length": 12, "do_lower_case": True}))
    check(folder)


def test_lengths_by_task(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "folder")
    path = folder / "sentence_bert_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "query_length": 5, "document_length": 9}))
    check(folder)


def test_old_class_paths_and_configurations(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "folder", dense(nn.Tanh()), Normalize())
    listed = json.loads((folder / "modules.json").read_text())
    for module in listed:
        module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    (folder / "modules.json").write_text(json.dumps(listed))
    pooling = {"word_embedding_dimension": SIZE, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**pooling, "pooling_mode_mean_tokens": False}))
    weights = dense(nn.Tanh())
    weights.linear = nn.Linear(2 * SIZE, 5)
    weights.in_features = 2 * SIZE
    weights.save(str(folder / "2_Dense"), safe_serialization=False)
    (folder / "2_Dense" / "model.safetensors").unlink()
    (folder / "sentence_bert_config.json").rename(folder / "sentence_roberta_config.json")
    (folder / "sentence_roberta_config.json").write_text(json.dumps({"max_seq_length": 20, "do_lower_case": False}))
    check(folder)


@pytest.mark.parametrize("version", ["2.7.0", "3.4.1", "5.1.2"])
def test_files_of_older_versions(tmp_path: Path, version: str) -> None:
    """The names, files and members are those that these versions of sentence-transformers write."""
    folder = pooled(tmp_path / "folder", dense(nn.Tanh()), Normalize(), modes="weightedmean")
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    listed = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "",
         "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]  # fmt: skip
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    pooling = {f"pooling_mode_{mode}": mode == "weightedmean_tokens" for mode in modes}
    activation = "torch.nn.modules.activation.Tanh"
    prompts = {"query": "the station: ", **({"document": ""} if version > "5" else {}), "odd": "a bus "}
    settings: dict[str, Any] = {
        **({"model_type": "SentenceTransformer"} if version > "5" else {}),
        "__version__": {"sentence_transformers": version, "transformers": "4.41.0", "pytorch": "2.3.0"},
        "prompts": prompts,
        "default_prompt_name": "odd",
        **({"similarity_fn_name": "cosine"} if version > "3" else {}),
    }
    for name, content in (
        ("modules.json", listed),
        ("config_sentence_transformers.json", settings),
        ("sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": False}),
        ("1_Pooling/config.json", {"word_embedding_dimension": SIZE, **pooling, "include_prompt": False}),
        (
            "2_Dense/config.json",
            {"in_features": SIZE, "out_features": 5, "bias": True, "activation_function": activation},
        ),
    ):
        assert (folder / name).exists()
        (folder / name).write_text(json.dumps(content))
    if version < "3":
        weights = load_file(folder / "2_Dense" / "model.safetensors")
        torch.save(weights, folder / "2_Dense" / "pytorch_model.bin")
        (folder / "2_Dense" / "model.safetensors").unlink()
    check(folder)


def test_an_unknown_prompt_lists_those_that_exist(tmp_path: Path) -> None:
    task = open_model(pooled(tmp_path / "folder", prompts=PROMPTS))
    with pytest.raises(ConchError, match="prompt_name is 'other'; the checkpoint has query, document, empty, passage"):
        embed(task, ["the"], prompt_name="other")
    with pytest.raises(ConchError, match="task is 'other'; the model has document, query"):
        embed(task, ["the"], task="other")


def test_a_named_prompt_replaces_that_of_the_task(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "folder", prompts=PROMPTS, default_prompt_name="passage")
    reference, task = SentenceTransformer(str(folder), device="cpu"), open_model(folder)
    for name in ("query", "passage", "empty"):
        expected = reference.encode(list(NEIGHBOURS), prompt_name=name)
        close(vectors(embed(task, NEIGHBOURS, prompt_name=name)), expected)
        close(vectors(embed(task, NEIGHBOURS, prompt_name=name, task="document")), expected)


def test_classification_and_clustering_need_no_prompt(tmp_path: Path) -> None:
    prompts = {"query": "the ", "clustering": "a bus "}
    task = open_model(pooled(tmp_path / "folder", prompts=prompts, default_prompt_name="query"))
    for purpose, name in (("clustering", "clustering"), ("classification", "query")):
        expected = vectors(embed(task, ["is open"], prompt_name=name))
        assert np.array_equal(vectors(embed(task, ["is open"], task=purpose)), expected)
    named = vectors(embed(task, ["is open"], task="clustering", prompt_name="query"))
    assert np.array_equal(named, vectors(embed(task, ["is open"], prompt_name="query")))


def test_the_similarity_function_is_a_fact(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "folder", similarity_fn_name="manhattan")
    assert open_model(folder).runtime_facts == {"similarity": "manhattan"}


def test_a_default_prompt_that_is_missing_is_refused(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "folder")
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps({"default_prompt_name": "other"}))
    with pytest.raises(ConchError, match="the default_prompt_name 'other'"):
        open_model(folder)


def test_a_network_in_a_subfolder(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "folder", prompts=PROMPTS)
    listed = json.loads((folder / "modules.json").read_text())
    listed[0]["path"] = "0_Transformer"
    (folder / "0_Transformer").mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(folder / "0_Transformer" / path.name)
    (folder / "modules.json").write_text(json.dumps(listed))
    check(folder)


def test_the_last_token_of_a_decoder_that_pads_on_the_left(tmp_path: Path) -> None:
    base = tmp_path / "backbone"
    base.mkdir()
    tokenizer = byte_level(base)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(base)
    sizes = {"hidden_size": SIZE, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        intermediate_size=64,
        initializer_range=0.4,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    Qwen2Model(config).save_pretrained(base)
    check(saved(tmp_path / "folder", Transformer(str(base)), Pooling(SIZE, "lasttoken"), Normalize(), prompts=PROMPTS))


def test_output_of_the_network_for_each_token_is_given_on_request(tmp_path: Path) -> None:
    folder = pooled(tmp_path / "model", Normalize(), prompts=PROMPTS)
    task = open_model(folder)
    texts = list(NEIGHBOURS[:3])
    reference = SentenceTransformer(str(folder), device="cpu")
    expected = [reference.encode(text, prompt_name="query", output_value="token_embeddings") for text in texts]
    asked = request("embedding", "last_hidden_state", "num_input_tokens", text_input=texts, task=["query"] * 3)
    beside = request("embedding", text_input=[NEIGHBOURS[5]])
    result, other = completed(task.execute([task.prepare(asked), task.prepare(beside)], ExecutionWork()))
    counts = result.outputs["num_input_tokens"][:, 0]  # type: ignore[index]
    for row, count, own in zip(result.outputs["last_hidden_state"], counts, expected, strict=True):  # type: ignore[arg-type]
        close(row[:count], own.numpy())
        assert not row[count:].any()
    assert other.outputs.keys() == {"embedding"}
