"""The backend ``vllm``: unknown names in its files, and the choice of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conch.backends.base.arrays import Request
from conch.backends.io_formats import vllm
from conch.backends.io_formats.vllm import VllmBackend
from conch.core.errors import Code, ConchError, cancelled, invalid
from conch.workers.child.packing import Packer
from tests.unit.backends.tensor_backends import initialise, parameters


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        ({}, {"gpu_memory_utilisation": 0.5}, "parameter 'gpu_memory_utilisation' is not known; did you mean "),
        ({}, {"max_num_seq": 4}, "parameter 'max_num_seq' is not known; did you mean 'max_num_seqs'?"),
        ({"max_model_lenght": "64"}, {}, "parameter 'max_model_lenght' is not known; did you mean 'max_model_len'?"),
    ],
)
def test_misspelt_names_are_refused_before_the_model_is_looked_for(
    tmp_path: Path, given: dict[str, str], arguments: dict[str, float], message: str
) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"model": "org/name", **arguments}))
    with pytest.raises(ConchError) as refused:
        initialise(VllmBackend, tmp_path, {"parameters": parameters(**given)})
    assert refused.value.message.startswith(message)
    assert refused.value.code is Code.INVALID_ARG


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, *, installed: bool, **given: str) -> Any:
    """The backend of a model whose checkpoint is elsewhere; ``installed`` says whether vLLM is."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64})
    )
    (checkpoint / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (checkpoint / "tokenizer.json").write_text("{}")
    version = folder / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps({"model": str(checkpoint), "gpu_memory_utilization": 0.5}))
    monkeypatch.setattr(vllm, "find_spec", lambda name: object() if installed else None)
    return initialise(VllmBackend, version, {"parameters": parameters(**given)})


def engine_of(backend: Any, kind: str) -> str:
    """The engine of the backend's model on an instance of ``kind``."""
    name: str = backend.choose_engine(backend.open_checkpoint(), {"kind": kind, "device_id": 0})
    return name


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_vllm_serves_its_models_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    backend = opened(tmp_path, monkeypatch, installed=True)
    assert engine_of(backend, kind) == "vllm"
    assert backend.arguments("vllm") == {"gpu_memory_utilization": 0.5}
    assert backend.channel.lines == []


def test_another_engine_is_used_where_the_configuration_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path, monkeypatch, installed=True, engine="transformers")
    assert engine_of(backend, "CPU") == "transformers"
    assert backend.arguments("transformers") == {}
    assert backend.channel.lines == [
        ("WARNING", "model 'm': engine arguments without effect: gpu_memory_utilization")
    ]  # fmt: skip


def test_a_warning_says_that_vllm_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(tmp_path, monkeypatch, installed=False)
    assert engine_of(backend, "CPU") == "transformers"
    assert backend.arguments("transformers") == {}
    missing, unused = backend.channel.lines
    assert missing[0] == unused[0] == "WARNING"
    assert missing[1].startswith("model 'm': vLLM is not installed here (")
    assert missing[1].endswith("), so engine 'transformers' serves the model")
    assert unused[1] == "model 'm': engine arguments without effect: gpu_memory_utilization"


@pytest.mark.parametrize(
    ("error", "packed"),
    [
        (invalid("no such n", "n"), ["INVALID_ARG", "Error generating stream: no such n", "n", None]),
        (cancelled("Request was cancelled"), ["CANCELLED", "Request was cancelled", None, None]),
    ],
)
def test_an_error_of_the_engine_is_put_as_triton_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: ConchError, packed: list[str]
) -> None:
    backend = opened(tmp_path, monkeypatch, installed=True)
    assert backend.pack(Request({}, frozenset()), error, Packer())["error"] == packed
