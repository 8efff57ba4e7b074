"""Loading a ``tensorrt_llm`` model: the parameters passed to its engine, and warnings about the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.backends.generation import generation_backend
from conch.backends.generation.engine import EngineSpec
from conch.backends.io_formats.tensorrtllm import TensorRtLlmBackend
from conch.core.errors import ConchError
from tests.unit.backends.generation.fake_engine import FakeEngine

pytest.importorskip("torch")
pytest.importorskip("transformers")


class Channel:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []

    def send(self, header: dict[str, Any], packer: Any = None) -> None:
        self.frames.append(header)

    def pending(self) -> bool:
        return False

    def logged(self, level: str) -> list[str]:
        return [frame["message"] for frame in self.frames if frame["op"] == "log" and frame["level"] == level]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    from tests.checkpoints import train_tokenizer, write_checkpoint

    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder, LlamaConfig, {"intermediate_size": 64}, train_tokenizer(), seed=0)
    return folder


def config_of(*inputs: str, **parameters: str) -> dict[str, Any]:
    return {
        "name": "tensorrt_llm",
        "max_batch_size": 8,
        "input": [{"name": name, "data_type": "TYPE_INT32", "dims": [-1]} for name in ("input_ids", *inputs)],
        "output": [{"name": "output_ids", "data_type": "TYPE_INT32", "dims": [-1, -1]}],
        "parameters": {name: {"string_value": text} for name, text in parameters.items()},
    }


def load(
    config: dict[str, Any], version: Path, monkeypatch: pytest.MonkeyPatch, kind: str = "CPU"
) -> tuple[Channel, str, EngineSpec]:
    opened: list[tuple[str, EngineSpec]] = []

    def open_engine(name: str, spec: EngineSpec) -> FakeEngine:
        opened.append((name, spec))
        engine = FakeEngine(max_sequences=3)
        engine.name = name  # type: ignore[misc]
        return engine

    monkeypatch.setattr(generation_backend, "open_engine", open_engine)
    channel = Channel()
    model = {"name": "tensorrt_llm", "version": "1", "version_directory": str(version)}
    init = {"model": model, "config": json.dumps(config), "log": {"info": True, "warning": True}}
    backend = TensorRtLlmBackend(channel, init)  # type: ignore[arg-type]
    backend.start({"kind": kind, "device_id": 0, "count": 1}, backend.complete())
    assert backend.slots == 3
    backend.stop()
    return channel, *opened[0]


def test_the_engine_is_told_what_the_parameters_say(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {"gpt_model_path": str(checkpoint), "max_tokens_in_paged_kv_cache": "640",
                  "enable_kv_cache_reuse": "true", "max_beam_width": "${max_beam_width}"}  # fmt: skip
    channel, name, spec = load(config_of(**parameters), tmp_path, monkeypatch)
    assert name == "transformers"
    assert (spec.directory, spec.cache_tokens, spec.prefix_caching, spec.eos_ids) == (checkpoint, 640, True, (0,))
    assert not channel.logged("WARNING")


def test_a_path_may_be_relative_to_the_version(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama").symlink_to(checkpoint)
    _, _, spec = load(config_of(engine_dir="llama"), tmp_path, monkeypatch)
    assert spec.directory == checkpoint.resolve()
    assert not spec.prefix_caching


def test_unknown_parameters_are_named_in_one_warning(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("colour", gpt_model_path=str(checkpoint), team="nlp", cuda_graph_mode="true", size="9")
    channel, _, _ = load(config, tmp_path, monkeypatch)
    assert channel.logged("WARNING") == [
        "model 'tensorrt_llm': parameters without effect: size, team",
        "model 'tensorrt_llm': inputs without effect: colour",
    ]


def test_a_compiled_engine_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank0.engine").touch()
    with pytest.raises(ConchError, match="holds a compiled TensorRT-LLM engine, which only TensorRT-LLM runs"):
        load(config_of(), tmp_path, monkeypatch)
