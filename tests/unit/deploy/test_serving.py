"""An artifact has the variants of converted models that serve, and no others."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from conch.checkpoints.manifest import Manifest, Source, Variant, hashes
from conch.config.pbtxt import parse
from conch.config.schema import ModelConfig
from conch.core.errors import ConchError
from conch.deploy.archives import copy, write_tar_gz, write_zip
from conch.deploy.bundle import only_serving
from conch.deploy.requirements import contents

CPU = 'backend: "huggingface" instance_group { count: 1 kind: KIND_CPU }\n'
FILES = (
    "config.json", "model.safetensors", "1_Pooling/config.json", "onnxruntime-int8.onnx", "onnxruntime-fp32.onnx",
    "onnxruntime-fp32.onnx.data", "openvino-fp32.xml", "openvino-fp32.bin", "openvino-int8.xml", "openvino-int8.bin",
)  # fmt: skip
SHARED = ["1/1_Pooling/config.json", "1/config.json", "1/conch.json", "config.pbtxt"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    version = tmp_path / "models" / "m" / "1"
    for name in FILES:
        (version / name).parent.mkdir(parents=True, exist_ok=True)
        (version / name).write_text(name)
    (version.parent / "config.pbtxt").write_text(CPU)
    (version.parent / "report.html").write_text("report")
    variants = (
        Variant("torch-fp32", "torch", "fp32", passed=True),
        Variant("onnxruntime-fp32", "onnxruntime", "fp32", "onnxruntime-fp32.onnx", passed=True),
        Variant("onnxruntime-int8", "onnxruntime", "int8", "onnxruntime-int8.onnx", passed=True),
        Variant("openvino-fp32", "openvino", "fp32", "openvino-fp32.xml", passed=True),
        Variant("openvino-bf16", "openvino", "bf16", "openvino-fp32.xml", passed=True),
        Variant("openvino-int8", "openvino", "int8", "openvino-int8.xml", passed=True),
        Variant("tensorrt-fp16", "tensorrt", "fp16", reasons=("not built",)),
    )
    Manifest(Source("c"), "feature-extraction", variants, "onnxruntime-int8", hashes(version)).write(version)
    return tmp_path / "models"


def _kept(root: Path, config: str = CPU) -> list[str]:
    (root / "m" / "config.pbtxt").write_text(config)
    found = only_serving(root, contents(root), {"m": _config(config)})
    return sorted(entry.name.removeprefix("m/") for entry in found.entries)


def _config(text: str) -> ModelConfig:
    return parse(text, "config.pbtxt")


def _with(name: str, value: str) -> str:
    return f'{CPU}parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


@pytest.mark.parametrize(
    ("config", "own"),
    [
        (CPU, ["1/onnxruntime-int8.onnx"]),
        (_with("variant", "openvino-int8"), ["1/openvino-int8.bin", "1/openvino-int8.xml"]),
        (_with("variant", "openvino-bf16"), ["1/openvino-fp32.bin", "1/openvino-fp32.xml"]),
        (_with("variant", "onnxruntime-fp32"), ["1/onnxruntime-fp32.onnx", "1/onnxruntime-fp32.onnx.data"]),
        (_with("engine", "torch"), ["1/model.safetensors"]),
    ],
)
def test_only_the_variant_that_serves_is_packed(root: Path, config: str, own: list[str]) -> None:
    assert _kept(root, config) == sorted([*SHARED, *own])


def test_the_variant_beside_it_is_packed_as_well(root: Path) -> None:
    version = root / "m" / "1"
    document = json.loads((version / "conch.json").read_text())
    document["by_shape"] = {
        "variant": "openvino-int8",
        "gains": [{"batch": 1, "tokens": 16, "gain": 1.2}],
        "overall": 1.2,
    }
    (version / "conch.json").write_text(json.dumps(document))
    both = ["1/onnxruntime-int8.onnx", "1/openvino-int8.bin", "1/openvino-int8.xml"]
    assert _kept(root) == sorted([*SHARED, *both])
    assert _kept(root, _with("by_shape", "false")) == sorted([*SHARED, "1/onnxruntime-int8.onnx"])


def test_what_may_run_on_a_gpu_stays_whole(root: Path) -> None:
    assert set(FILES) <= {name.removeprefix("1/") for name in _kept(root, CPU.replace("KIND_CPU", "KIND_GPU"))}


def test_a_folder_that_another_model_names_stays_whole(root: Path) -> None:
    (root / "other" / "1").mkdir(parents=True)
    (root / "other" / "1" / "model.json").write_text('{"model": "../../m/1", "variant": "openvino-int8"}')
    found = only_serving(root, contents(root), {"m": _config(CPU), "other": _config('backend: "huggingface"')})
    assert {f"m/1/{name}" for name in FILES} <= {entry.name for entry in found.entries}


def test_the_packed_manifest_is_that_of_the_packed_files(root: Path, tmp_path: Path) -> None:
    found = only_serving(root, contents(root), {"m": _config(CPU)})
    assert "m/1/model.safetensors" in found.left_out and "m/report.html" in found.left_out
    packed = tmp_path / "packed"
    copy(packed, found)
    manifest = Manifest.read(packed / "m" / "1")
    assert manifest is not None
    manifest.verify(packed / "m" / "1")
    assert manifest.select().name == "onnxruntime-int8"
    with pytest.raises(ConchError, match="the files of variant 'openvino-int8' were left out"):
        manifest.variant("openvino-int8")
    write_tar_gz(tmp_path / "a.tar.gz", found)
    write_zip(tmp_path / "a.zip", found, "models")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.read("models/m/1/conch.json") == (packed / "m" / "1" / "conch.json").read_bytes()
