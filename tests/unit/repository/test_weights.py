"""How large weights are, from the files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conch.repository.weights import find_weights


def _files(folder: Path, sizes: dict[str, int]) -> Path:
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    return folder


def test_parts_of_a_checkpoint_are_summed(tmp_path: Path) -> None:
    folder = _files(tmp_path, {"model-00001-of-00002.safetensors": 30, "model-00002-of-00002.safetensors": 12})
    assert find_weights(folder).size == 42
    assert len(find_weights(folder).files) == 2


def test_the_smallest_form_counts(tmp_path: Path) -> None:
    sizes = {"model.safetensors": 100, "pytorch_model.bin": 101, "onnx/model.onnx": 90, "onnx/model_int8.onnx": 25}
    assert find_weights(_files(tmp_path, sizes)).size == 25


def test_another_copy_of_the_weights_is_not_counted_twice(tmp_path: Path) -> None:
    sizes = {"model.safetensors": 100, "model.fp16.safetensors": 50, "consolidated.safetensors": 100}
    assert find_weights(_files(tmp_path, sizes)).size == 100


def test_a_graph_has_the_tensors_beside_it(tmp_path: Path) -> None:
    assert find_weights(_files(tmp_path / "a", {"model.onnx": 1, "model.onnx_data": 50})).size == 51
    assert find_weights(_files(tmp_path / "b", {"model.onnx": 1, "model.onnx.data": 50})).size == 51
    assert find_weights(_files(tmp_path / "c", {"openvino_model.xml": 1, "openvino_model.bin": 50})).size == 50


@pytest.mark.parametrize("named", ["checkpoint", "../checkpoint", "$$TRITON_MODEL_DIRECTORY/checkpoint"])
def test_another_folder_may_be_named(tmp_path: Path, named: str) -> None:
    folder = tmp_path / "m" / "checkpoint"
    _files(folder, {"model.safetensors": 9})
    version = tmp_path / "m" / "1"
    version.mkdir()
    assert find_weights(version, {"model": named}).size == 9
    (version / "model.json").write_text(json.dumps({"model": named}))
    assert find_weights(version).size == 9


def test_one_file_may_be_named(tmp_path: Path) -> None:
    _files(tmp_path, {"small.gguf": 5, "large.gguf": 50})
    assert find_weights(tmp_path, {"model": str(tmp_path / "large.gguf")}).size == 50


def test_all_files_of_a_gguf_model_count(tmp_path: Path) -> None:
    folder = _files(tmp_path, {"m-bf16-00001-of-00002.gguf": 5, "m-bf16-00002-of-00002.gguf": 50, "mmproj-m.gguf": 7})
    for parameters in ({}, {"model": str(folder / "m-bf16-00001-of-00002.gguf")}):
        weights = find_weights(folder, parameters)
        assert (weights.size, len(weights.files)) == (62, 3), parameters
    _files(folder, {"other.gguf": 90})
    assert find_weights(folder).size == 55, "a projector is not for one of several models"


@pytest.mark.parametrize("model", ["", "m.gguf"])
def test_a_projector_and_a_draft_model_that_parameters_name_count(tmp_path: Path, model: str) -> None:
    folder = _files(tmp_path / "m", {"1/m.gguf": 50, "1/mmproj-m.gguf": 7, "mmproj/f16.gguf": 3, "draft/d.gguf": 11})
    parameters = {"model": model} if model else {}
    weights = find_weights(folder / "1", {**parameters, "mmproj": "mmproj/f16.gguf"})
    assert (weights.size, weights.least, len(weights.files)) == (53, 53, 2)
    for draft in ("draft", "../draft/d.gguf", "$$TRITON_MODEL_DIRECTORY/draft"):
        weights = find_weights(folder / "1", {**parameters, "speculative_model": draft})
        assert (weights.size, weights.least, len(weights.files)) == (68, 68, 3), draft
    assert find_weights(folder / "1", {**parameters, "mmproj": "none.gguf", "speculative_model": "none"}).size == 57


def test_a_model_of_the_hub_is_found_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--name"
    _files(folder / "snapshots" / "abc", {"model.safetensors": 7})
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (tmp_path / "1").mkdir()
    assert find_weights(tmp_path / "1", {"model": "org/name"}).size == 7


def test_smaller_numbers_take_less(tmp_path: Path) -> None:
    folder = _files(tmp_path, {"model.safetensors": 80})
    assert find_weights(folder).least == 80
    assert find_weights(folder, {"dtype": "bfloat16"}).least == 40
    assert find_weights(folder, {"load_in_4bit": "true"}).least == 10


@pytest.mark.parametrize("content", [None, b"{", b"[1]", b'{"model": 3}', b'{"model": "no/such"}'])
def test_what_cannot_be_read_has_no_weights(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.json").write_bytes(content)
    assert find_weights(tmp_path / "1" if content is None else tmp_path).size == 0


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """A converted model, whose smallest variant is not the one that serves."""
    folder = _files(tmp_path, {"model.safetensors": 100, "a.onnx": 20, "b.xml": 1, "b.bin": 7, "c.onnx": 3})
    variants = [
        {"name": "a", "engine": "onnxruntime", "path": "a.onnx", "passed": True, "latency": [{"mean_ms": 2}]},
        {"name": "b", "engine": "openvino", "path": "b.xml", "passed": True, "precision": "bf16"},
        {"name": "c", "engine": "onnxruntime", "path": "c.onnx", "passed": True, "latency": [{"mean_ms": 3}]},
        {"name": "t", "engine": "torch", "path": "", "forced": True},
        {"name": "wrong", "engine": "torch", "path": ""},
    ]
    (folder / "conch.json").write_text(json.dumps({"auto": "a", "by_shape": None, "variants": variants}))
    return folder


def _change(folder: Path, **values: object) -> None:
    path = folder / "conch.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("parameters", "size"),
    [
        ({}, 20),
        ({"variant": "c"}, 3),
        ({"variant": "t"}, 100),
        ({"engine": "onnxruntime"}, 20),
        ({"engine": "openvino"}, 8),
        ({"engine": "torch"}, 100),
        ({"engine": "transformers"}, 100),
    ],
)
def test_the_variant_that_runs_counts_and_not_the_smallest(
    converted: Path, parameters: dict[str, str], size: int
) -> None:
    assert find_weights(converted, parameters).size == size
    _change(converted, auto="t")
    assert find_weights(converted, parameters).size == (size if parameters else 100)


def test_the_name_of_a_variant_asks_for_no_smaller_numbers(converted: Path) -> None:
    assert find_weights(converted, {"variant": "c", "engine": "auto", "note": "int8"}).least == 3
    # Numbers of 32 bits that are computed with in 16.
    assert find_weights(converted, {"variant": "b"}).least == 4


def test_both_variants_of_a_converted_model_count_where_two_serve(converted: Path) -> None:
    _change(converted, by_shape={"variant": "b"})
    assert find_weights(converted).size == 28
    for one, size in (({"by_shape": "false"}, 20), ({"variant": "a"}, 20), ({"engine": "openvino"}, 8)):
        assert find_weights(converted, one).size == size
    _change(converted, by_shape={"variant": "t"}, auto="b")
    assert find_weights(converted).size == 108
    assert {path.name for path in find_weights(converted).files} == {"b.xml", "b.bin", "model.safetensors"}


def test_on_a_gpu_the_checkpoint_itself_counts_unless_a_variant_is_named(converted: Path) -> None:
    _change(converted, by_shape={"variant": "b"})
    assert find_weights(converted, gpu=True).size == 100
    assert find_weights(converted, {"variant": "a"}, gpu=True).size == 20
    (converted / "model.safetensors").unlink()
    assert find_weights(converted, gpu=True).size == 28


@pytest.mark.parametrize(
    "content", ["[]", '{"variants": 3}', '{"variants": [3]}', '{"variants": [{"passed": 1}]}', "{"]
)
def test_manifest_that_cannot_be_understood_keeps_nothing_from_being_tried(tmp_path: Path, content: str) -> None:
    _files(tmp_path, {"model.safetensors": 100})
    (tmp_path / "conch.json").write_text(content)
    assert find_weights(tmp_path).size in (0, 100)
