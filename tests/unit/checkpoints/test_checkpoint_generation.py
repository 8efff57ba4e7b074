"""Checkpoints of models that generate text: folders and GGUF files, and the engines for them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import TEXT_ENGINES, Options
from conch.core.errors import ConchError
from tests.refusals import refused_argument
from tests.unit.checkpoints.folders import checkpoint
from tests.unit.checkpoints.gguf_files import content, write_model

CAUSAL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256}


def opened(folder: Path, **values: Any) -> Checkpoint:
    return Checkpoint.open(folder, Options.from_values(values))


def refusal(folder: Path, **values: Any) -> str:
    return refused_argument(opened, folder, **values)


def test_folder_of_a_causal_model_opens(tmp_path: Path) -> None:
    checkpoint(tmp_path, CAUSAL, tokenizer_config__json={"model_max_length": 100})
    found = opened(tmp_path)

    assert (found.task, found.engine, found.gguf) == ("text-generation", "transformers", None)
    # The context is what the network has, whatever the tokenizer is set to.
    assert (found.positions, found.max_length) == (256, 256)


@pytest.mark.parametrize(
    ("asked", "engine"),
    [("auto", "transformers"), ("torch", "transformers"), ("transformers", "transformers"), ("vllm", "vllm")],
)
def test_engine_is_the_one_asked_for(tmp_path: Path, asked: str, engine: str) -> None:
    found = opened(checkpoint(tmp_path, CAUSAL), engine=asked)
    assert found.engine == engine
    assert found.options.engine == ("auto" if asked == "auto" else engine)


def test_export_beside_the_configuration_is_run_by_openvino(tmp_path: Path) -> None:
    checkpoint(tmp_path, CAUSAL, model__safetensors=None, openvino_model__xml="<net/>", openvino_model__bin="")
    assert opened(tmp_path).engine == "openvino"


def test_engine_that_does_not_generate_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, CAUSAL)
    message = "engine 'onnxruntime' does not generate text: choose one of llamacpp, openvino, transformers, vllm"
    assert refusal(tmp_path, engine="onnxruntime") == message


def test_engines_of_encoders(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    assert opened(tmp_path, engine="transformers").engine == "torch"
    message = "engine 'vllm' is for task 'text-generation', and the task is 'feature-extraction'"
    assert refusal(tmp_path, engine="vllm") == message


def test_another_engine_is_one_entry_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEXT_ENGINES, "mlx", "torch")  # type: ignore[arg-type]
    folder = checkpoint(tmp_path / "text", CAUSAL)
    assert Checkpoint.open(folder, Options(engine="mlx")).engine == "mlx"

    checkpoint(tmp_path / "encoder")
    with pytest.raises(ConchError, match="engine 'mlx' is for task 'text-generation'"):
        Checkpoint.open(tmp_path / "encoder", Options(engine="mlx"))

    checkpoint(tmp_path / "code", {**CAUSAL, "model_type": "new", "auto_map": {"AutoModelForCausalLM": "code.New"}})
    with pytest.raises(ConchError, match="needs the Python code of its checkpoint"):
        Checkpoint.open(tmp_path / "code", Options(engine="mlx"))


def test_content_of_a_model_file_may_be_given(tmp_path: Path) -> None:
    checkpoint(tmp_path / "weights", CAUSAL)
    (tmp_path / "model.json").write_text(json.dumps({"model": "org/other", "gpu_memory_utilization": 0.5, "lists": []}))
    found = Checkpoint.open(tmp_path, Options(), model_file={"model": "weights"})
    assert found.directory == tmp_path / "weights"


@pytest.mark.parametrize(
    ("named", "file"),
    [
        ({}, "m/1/net.gguf"),
        ({"model": "net.gguf"}, "m/1/net.gguf"),
        ({"model": "weights"}, "m/weights/net.gguf"),
        ({"model": "weights/net.gguf"}, "m/1/weights/net.gguf"),
        ({"model": "$$TRITON_MODEL_DIRECTORY/net.gguf"}, "m/net.gguf"),
    ],
)
@pytest.mark.parametrize("by_file", [False, True])
def test_gguf_file_is_found_and_read(tmp_path: Path, named: dict[str, str], file: str, by_file: bool) -> None:
    path = write_model(tmp_path / file)
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True, exist_ok=True)
    if by_file:
        (version / "model.json").write_text(json.dumps(named))
    found = opened(version, **({} if by_file else named))

    assert found.gguf is not None and (found.gguf.path, found.directory) == (path, path.parent)
    assert (found.task, found.engine, found.positions, found.max_length) == ("text-generation", "openvino", 256, 256)
    assert found.config["num_hidden_layers"] == 2 and found.labels is None


@pytest.mark.parametrize("engine", ["transformers", "vllm", "openvino"])
def test_gguf_file_runs_on_any_engine(tmp_path: Path, engine: str) -> None:
    write_model(tmp_path / "net.gguf")
    assert opened(tmp_path, engine=engine).engine == engine


def test_gguf_file_beside_other_weights_is_not_used(tmp_path: Path) -> None:
    checkpoint(tmp_path, CAUSAL)
    write_model(tmp_path / "net.gguf")
    assert opened(tmp_path).gguf is None
    named = opened(tmp_path, model="net.gguf").gguf
    assert named is not None and named.path == tmp_path / "net.gguf"


def test_configuration_beside_a_gguf_file_does_not_hide_it(tmp_path: Path) -> None:
    checkpoint(tmp_path, CAUSAL, model__safetensors=None)
    write_model(tmp_path / "net.gguf")
    gguf = opened(tmp_path).gguf
    assert gguf is not None and gguf.path == tmp_path / "net.gguf"


def test_projector_beside_the_only_gguf_file_reads_its_images(tmp_path: Path) -> None:
    projector = {"general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True}
    write_model(tmp_path / "net.gguf")
    assert not opened(tmp_path).reads_media
    for name in ("mmproj-net.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(content(projector))
    named = opened(tmp_path, model="net.gguf", mmproj="other.gguf")
    assert (named.projector, named.media_extras) == (tmp_path / "other.gguf", ("image",))
    (tmp_path / "other.gguf").unlink()
    for found in (opened(tmp_path), opened(tmp_path, model="net.gguf")):
        assert (found.reads_media, found.projector) == (True, tmp_path / "mmproj-net.gguf")
        assert ("path", str(tmp_path / "mmproj-net.gguf")) in found.dependencies
    (tmp_path / "net-MMProj-f16.gguf").touch()
    assert "has 2 projectors: set parameter 'mmproj' to one of mmproj-net.gguf, net-MMProj-f16.gguf" in refusal(
        tmp_path
    )


@pytest.mark.parametrize(
    ("names", "values", "message"),
    [
        (["a.gguf", "b.gguf"], {}, "has 2 GGUF files: set parameter 'model' to one of a.gguf, b.gguf"),
        (["a.gguf"], {"model": "b.gguf"}, "model file 'b.gguf' does not exist"),
        (["a.gguf"], {"task": "fill-mask"}, "a.gguf is for task 'text-generation', not for 'fill-mask'"),
        (["a.gguf"], {"engine": "onnxruntime"}, "engine 'onnxruntime' does not generate text"),
    ],
)
def test_gguf_file_that_cannot_be_served_is_refused(
    tmp_path: Path, names: list[str], values: dict[str, str], message: str
) -> None:
    for name in names:
        write_model(tmp_path / name)
    assert message in refusal(tmp_path, **values)


def test_pipe_is_not_read_as_a_gguf_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gguf")
    assert refusal(tmp_path, model="a.gguf") == "model file 'a.gguf' is not a regular file"


def test_broken_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert refusal(tmp_path).endswith("it was cut off, or declares more data than it contains")
