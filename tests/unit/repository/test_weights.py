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


def test_both_variants_of_a_converted_model_count_where_two_serve(tmp_path: Path) -> None:
    sizes = {"model.safetensors": 100, "a.onnx": 20, "b.xml": 1, "b.bin": 7, "c.onnx": 3}
    folder = _files(tmp_path, sizes)
    variants = [{"name": "a", "path": "a.onnx"}, {"name": "b", "path": "b.xml"}, {"name": "t", "path": ""}]

    def two(auto: str, other: str) -> None:
        (folder / "conch.json").write_text(
            json.dumps({"auto": auto, "by_shape": {"variant": other}, "variants": variants})
        )

    two("a", "b")
    assert find_weights(folder).size == 27
    for one in ({"by_shape": "false"}, {"variant": "a"}, {"engine": "openvino"}):
        assert find_weights(folder, one).size == 3
    two("b", "t")
    assert find_weights(folder).size == 107
