"""What a repository needs: extras, packages, checkpoints; and repositories that cannot be deployed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conch.core.errors import Code, ConchError
from conch.deploy.requirements import read_requirements
from tests.models import write

MOUNT = "/opt/ds/model/deployed_model"
TENSORS = """
input { name: "A" data_type: TYPE_FP32 dims: [1] }
output { name: "B" data_type: TYPE_FP32 dims: [1] }
"""
PYTHON = 'backend: "python"' + TENSORS
ENSEMBLE = """
platform: "ensemble"
ensemble_scheduling {
  step {
    model_name: "a" model_version: -1 input_map { key: "A" value: "A" } output_map { key: "B" value: "B" }
  }
}
"""
MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


def checkpoint(repository: Path, name: str, config: str = 'backend: "huggingface"', **document: object) -> None:
    """A model whose checkpoint ``document`` names."""
    write(repository, name, config, {"1/model.json": json.dumps(document)})


def test_what_python_models_import_is_installed(tmp_path: Path) -> None:
    source = f"import json\nimport numpy\nimport yaml\nimport pytest\nimport helper\n{MODEL}"
    write(tmp_path, "m", PYTHON, {"1/model.py": source, "1/helper.py": "import faiss\n"})
    assert read_requirements(tmp_path, MOUNT).packages == ("faiss-cpu", "pytest", "pyyaml")
    assert read_requirements(tmp_path, MOUNT).extras == ()


def test_a_package_is_named_as_it_is_installed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module's name may be that of another package: ``pip install jwt`` installs something else."""
    installed = {"shells": ["python-shells"], "sea": ["sea-urchins", "sea-core", "sea-core"]}
    for module, packages in installed.items():
        write(tmp_path / "site", module, None, {"__init__.py": ""})
        for package in packages:
            metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n"
            files = {"METADATA": metadata, "RECORD": f"{module}/__init__.py,,\n"}
            write(tmp_path / "site", f"{package.replace('-', '_')}-1.dist-info", None, files)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=":")
    write(tmp_path / "models", "m", PYTHON, {"1/model.py": f"import shells\nimport sea\n{MODEL}"})
    assert read_requirements(tmp_path / "models", MOUNT).packages == ("python-shells", "sea-core", "sea-urchins")


def test_checkpoints_from_the_hub_are_reported(tmp_path: Path) -> None:
    checkpoint(tmp_path, "a", model="org/encoder")
    checkpoint(tmp_path, "b", model="org/other", engine="openvino", task="text-classification")
    checkpoint(tmp_path, "c", 'backend: "vllm"', model="org/writer")
    checkpoint(tmp_path, "d", model="org/ears", task="automatic-speech-recognition")
    found = read_requirements(tmp_path, MOUNT)
    assert found.hub == ("org/ears", "org/encoder", "org/other", "org/writer")
    assert found.extras == ("audio", "huggingface", "openvino", "vllm")
    assert found.writers == ("c",)


@pytest.mark.parametrize(
    ("kind", "needs"), [("", False), ("KIND_AUTO", False), ("KIND_CPU", False), ("KIND_GPU", True)]
)
def test_only_models_that_require_a_gpu_need_one(
    kind: str, needs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conch.deploy.requirements.visible_gpus", lambda: ())
    group = f"instance_group {{ kind: {kind} }}" if kind else ""
    checkpoint(tmp_path, "m", f'backend: "huggingface" {group}', model="org/encoder")
    lacking = read_requirements(tmp_path, MOUNT).lacking
    assert any("runs on a GPU" in reason for reason in lacking) == needs


def test_adapters_need_their_extra_wherever_they_are_named(tmp_path: Path) -> None:
    named = 'backend: "huggingface" parameters { key: "lora_modules" value { string_value: "{\\"a\\": \\"b\\"}" } }'
    checkpoint(tmp_path / "config", "m", named, model="org/writer", task="text-generation")
    checkpoint(tmp_path / "document", "m", model="org/writer", task="text-generation", lora_modules={"a": "b"})
    checkpoint(tmp_path / "none", "m", model="org/writer", task="text-generation")
    for repository, lora in ("config", {"lora"}), ("document", {"lora"}), ("none", set()):
        assert set(read_requirements(tmp_path / repository, MOUNT).extras) & {"lora"} == lora


def test_a_model_that_chats_about_images_needs_what_reads_them(tmp_path: Path) -> None:
    config = json.dumps(
        {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {"hidden_size": 8}}
    )
    files = {"config.json": config, "processor_config.json": "{}", "tokenizer.json": "{}"}
    files["model.safetensors"] = "\2\0\0\0\0\0\0\0{}"
    write(tmp_path, "m", 'backend: "huggingface"', {f"1/{name}": text for name, text in files.items()})
    found = read_requirements(tmp_path, MOUNT)
    assert (found.extras, found.writers) == (("huggingface", "image", "structured"), ("m",))


@pytest.mark.parametrize(
    ("architecture", "kind", "extras"),
    [
        ("BertForSequenceClassification", "bert", ("huggingface",)),
        ("LlamaForCausalLM", "llama", ("huggingface", "structured")),
    ],
)
def test_requirements_come_from_a_checkpoint_in_the_repository(
    tmp_path: Path, architecture: str, kind: str, extras: tuple[str, ...]
) -> None:
    config = json.dumps({"architectures": [architecture], "model_type": kind})
    files = {"config.json": config, "tokenizer.json": "{}", "model.safetensors": "\2\0\0\0\0\0\0\0{}"}
    write(tmp_path, "m", 'backend: "huggingface"', {f"1/{name}": text for name, text in files.items()})
    found = read_requirements(tmp_path, MOUNT)
    assert (found.extras, found.hub) == (extras, ())
    assert found.writers == (("m",) if kind == "llama" else ())


def test_graphs_need_their_engine(tmp_path: Path) -> None:
    write(tmp_path, "m", 'backend: "onnxruntime"' + TENSORS, {"1/model.onnx": "not looked into"})
    assert read_requirements(tmp_path, MOUNT).extras == ("onnxruntime",)


def test_the_only_model_answers_or_the_only_ensemble(tmp_path: Path) -> None:
    write(tmp_path, "a", PYTHON, {"1/model.py": MODEL})
    assert read_requirements(tmp_path, MOUNT).chosen("") == "a"
    write(tmp_path, "b", PYTHON, {"1/model.py": MODEL})
    with pytest.raises(ConchError, match=r"several models \(a, b\): choose one with --model") as several:
        read_requirements(tmp_path, MOUNT).chosen("")
    assert several.value.code is Code.INVALID_ARG
    (write(tmp_path, "z", ENSEMBLE + TENSORS) / "1").mkdir()
    assert read_requirements(tmp_path, MOUNT).chosen("") == "z"
    assert read_requirements(tmp_path, MOUNT).chosen("b") == "b"
    with pytest.raises(ConchError, match="there is no model 'c' in the repository, which has a, b, z") as missing:
        read_requirements(tmp_path, MOUNT).chosen("c")
    assert missing.value.code is Code.NOT_FOUND


def test_a_repository_with_errors_is_refused_with_the_first_of_them(tmp_path: Path) -> None:
    write(tmp_path, "a", PYTHON, {"1/model.py": "class TritonPythonModel\n"})
    write(tmp_path, "b", 'backend: "python"\ninput {', {"1/model.py": MODEL})
    with pytest.raises(ConchError, match=r"the repository has errors: .*/a/1/model.py:1: .* \(and 1 more: conch check"):
        read_requirements(tmp_path, MOUNT)


@pytest.mark.parametrize(
    ("place", "complaint"),
    [("", "there are no models in"), ("gone", "does not exist"), ("m", "is a model, not a repository of models")],
)
def test_what_is_no_repository_is_refused(tmp_path: Path, place: str, complaint: str) -> None:
    if place == "m":
        write(tmp_path, "m", PYTHON, {"1/model.py": MODEL})
    with pytest.raises(ConchError, match=complaint):
        read_requirements(tmp_path / place, MOUNT)


@pytest.mark.parametrize("named", ["{outside}", "../../../outside"])
def test_a_checkpoint_outside_of_the_repository_is_refused(tmp_path: Path, named: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    config = 'backend: "tensorrtllm"\nparameters { key: "gpt_model_path" value: { string_value: "%s" } }'
    write(tmp_path / "models", "m", config % named.format(outside=outside), {"1/x": ""})
    with pytest.raises(ConchError, match=r"model 'm': 'gpt_model_path' names .*, which is not in the repository"):
        read_requirements(tmp_path / "models", MOUNT)


def test_a_folder_beside_that_of_the_platform_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "models-old"
    outside.mkdir()
    config = 'backend: "tensorrtllm"\nparameters { key: "gpt_model_path" value: { string_value: "%s" } }'
    write(tmp_path / "repository", "m", config % outside, {"1/x": ""})
    with pytest.raises(ConchError, match=r"names .*models-old, which is not in the repository"):
        read_requirements(tmp_path / "repository", str(tmp_path / "models"))


def test_a_place_of_the_platform_may_be_named(tmp_path: Path) -> None:
    config = 'backend: "tensorrtllm"\nparameters { key: "gpt_model_path" value: { string_value: "%s" } }'
    write(tmp_path, "m", config % f"{MOUNT}/model_repository/m/1", {"1/x": ""})
    assert read_requirements(tmp_path, MOUNT).extras == ("huggingface", "structured")
