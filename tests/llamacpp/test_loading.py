"""Files and adapters that the engine ``llamacpp`` loads, and the errors for those that it does not."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("llama_cpp") is None:
    pytest.skip("needs llama.cpp: make test-llamacpp", allow_module_level=True)

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from conch.backends.generation.agreement import verify_gguf
from conch.backends.generation.lora import LoraWeights
from conch.checkpoints.gguf import read_gguf
from conch.core.errors import Code, ConchError
from tests.llamacpp.models import NO_VOCABULARY, Alone, demo, opened, request, write
from tests.unit.backends.engines.driving import finished_by_id, tokens
from tests.unit.checkpoints import gguf_models
from tests.unit.checkpoints.gguf_files import LLAMA
from tests.unit.checkpoints.gguf_splits import split

pytestmark = pytest.mark.timeout(300)

PROMPT = [9, 8, 7, 6, 5, 4, 3, 11, 12]
RANK, ALPHA = 4, 8.0


def changes(path: Path) -> dict[str, Any]:
    """The factors of a LoRA adapter for the queries and values of a file, by the name of the matrix."""
    chance = np.random.default_rng(5)
    matrices = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors
    }
    return {
        name: (chance.normal(0, 0.5, (RANK, columns)), chance.normal(0, 0.5, (rows, RANK)), matrices[name])
        for name in matrices
        if name.endswith(("attn_q.weight", "attn_v.weight"))
        for rows, columns in [matrices[name].shape]
    }


def write_adapter(path: Path, factors: dict[str, Any], architecture: str = "llama") -> Path:
    """Write an adapter as ``convert_lora_to_gguf.py`` does."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for name, (first, second, _) in factors.items():
        writer.add_tensor(f"{name}.lora_a", first.astype(np.float32))
        writer.add_tensor(f"{name}.lora_b", second.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path, **fields: Any) -> ConchError:
    with pytest.raises(ConchError) as refused:
        with opened(path, **fields):
            pass
    return refused.value


def test_adapter_gives_the_tokens_of_the_merged_weights_beside_the_model_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "base.gguf", "llama")
    factors = changes(path)
    merged = {
        name: (weight + ALPHA / RANK * second @ first).astype(np.float32)
        for name, (first, second, weight) in factors.items()
    }
    network = gguf_models.model("llama")
    target = gguf_models.write(tmp_path / "merged.gguf", "llama", network, metadata=NO_VOCABULARY, tensors=merged)
    adapter = write_adapter(tmp_path / "red.gguf", factors)
    wanted, plain = Alone(target).greedy(PROMPT, 20), Alone(path).greedy(PROMPT, 20)
    assert wanted != plain
    with opened(path, adapters={"red": adapter}) as engine:
        assert engine.adapters == ("red",)
        requests = [request(0, PROMPT, max_tokens=20, lora_name="red"), request(1, PROMPT, max_tokens=20)]
        for _ in range(2):
            done = finished_by_id(engine, *requests)
            assert tokens(done[0]) == wanted
            assert tokens(done[1]) == plain


def write_peft(folder: Path, network: Any) -> Path:
    """Write an adapter of PEFT for ``network``, and add it to its weights."""
    folder.mkdir()
    torch.manual_seed(7)
    tensors = {}
    for name, parameter in network.named_parameters():
        layer, _, _ = name.rpartition(".")
        if layer.endswith(("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")) and name.endswith("weight"):
            rows, columns = parameter.shape
            first, second = torch.randn(RANK, columns) * 0.5, torch.randn(rows, RANK) * 0.5
            tensors |= {
                f"base_model.model.{layer}.lora_A.weight": first,
                f"base_model.model.{layer}.lora_B.weight": second,
            }
            parameter.data += ALPHA / RANK * second @ first
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_adapter_of_peft_gives_the_tokens_of_the_merged_weights_also_at_run_time(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "base.gguf", name)
    network = gguf_models.model(name)
    adapter = write_peft(tmp_path / "red", network)
    merged = gguf_models.write(tmp_path / "merged.gguf", name, network, metadata=NO_VOCABULARY)
    wanted, plain = Alone(merged).greedy(PROMPT, 12), Alone(path).greedy(PROMPT, 12)
    assert wanted != plain
    with opened(path, adapters={"red": adapter}, adapter_folders=[tmp_path]) as engine:
        for key in ("red", "blue", "blue"):
            if key == "blue":
                engine.attach_adapter(key, LoraWeights.read(adapter))
            requests = [request(0, PROMPT, max_tokens=12, lora_name=key), request(1, PROMPT, max_tokens=12)]
            done = finished_by_id(engine, *requests)
            assert tokens(done[0]) == wanted
            assert tokens(done[1]) == plain
            if key == "blue":
                engine.detach_adapter(key)


def test_adapters_of_other_models_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "base.gguf", "llama")
    for adapter, reason in (
        (write_adapter(tmp_path / "foreign.gguf", changes(path), "qwen2"), "model arch and LoRA arch mismatch"),
        (write(tmp_path / "model.gguf", "llama"), "expect general.type to be 'adapter'"),
        (tmp_path / "no.gguf", "No such file or directory"),
    ):
        error = refusal(path, adapters={"red": adapter})
        assert error.code is Code.INVALID_ARG
        assert error.message.startswith(f"LoRA adapter {adapter}: ")
        assert reason in error.message


def test_file_of_an_unknown_architecture_is_refused_with_the_reason(tmp_path: Path) -> None:
    network = gguf_models.model("llama")
    known = {key.replace("llama.", "nonsense."): value for key, value in LLAMA.items() if key.startswith("llama.")}
    metadata = {"general.architecture": "nonsense", **known, **NO_VOCABULARY}
    path = gguf_models.write(tmp_path / "m.gguf", "llama", network, metadata=metadata)
    error = refusal(path)
    assert error.code is Code.INVALID_ARG
    assert error.message == f"engine 'llamacpp' cannot load {path}: unknown model architecture: 'nonsense'"


def test_file_with_a_tensor_of_another_shape_is_refused_with_the_reason(tmp_path: Path) -> None:
    network = gguf_models.model("llama")
    tensors = {"blk.1.ffn_up.weight": np.zeros((32, 32), np.float32)}
    path = gguf_models.write(tmp_path / "m.gguf", "llama", network, metadata=NO_VOCABULARY, tensors=tensors)
    error = refusal(path)
    assert error.code is Code.INVALID_ARG
    assert error.message.startswith(f"engine 'llamacpp' cannot load {path}: ")
    assert "blk.1.ffn_up.weight" in error.message


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"llama.attention.head_count": 3}, "tensor 'blk.0.attn_q.weight' has wrong shape"),
        ({"llama.block_count": 9}, "tensor 'blk.4.attn_norm.weight' not found"),
        ({"llama.block_count": 100_000}, "llama.cpp failed: llama-model.cpp"),  # a failed assertion
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "llama.cpp failed: ops.cpp"),
        ({"tokenizer.ggml.model": "nonsense"}, "unknown tokenizer: 'nonsense'"),
    ],
)
def test_file_with_wrong_metadata_is_refused_with_the_reason(
    tmp_path: Path, metadata: dict[str, Any], reason: str
) -> None:
    network = gguf_models.model("llama")
    path = gguf_models.write(tmp_path / "m.gguf", "llama", network, metadata={**NO_VOCABULARY, **metadata})
    error = refusal(path)
    assert error.code is Code.INVALID_ARG
    assert error.message.startswith("engine 'llamacpp' cannot ")
    assert reason in error.message
    with opened(write(tmp_path / "sound.gguf", "llama")) as engine:
        assert tokens(finished_by_id(engine, request(0, PROMPT, max_tokens=2))[0])


def test_model_in_several_files_gives_the_tokens_of_the_whole_file(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", "llama", "Q8_0")
    expected = Alone(whole).greedy(PROMPT, 12)
    first = split(whole, 8)
    with opened(first) as engine:
        assert tokens(finished_by_id(engine, request(0, PROMPT, max_tokens=12))[0]) == expected
        assert " of 8 tokens agree" in verify_gguf(engine, read_gguf(first), [PROMPT], 1)


def test_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama")
    path.write_bytes(path.read_bytes()[:-1000])
    error = refusal(path)
    assert error.code is Code.INVALID_ARG
    assert str(path) in error.message and "cut off" in error.message


def test_file_with_weights_that_are_no_numbers_is_refused(tmp_path: Path) -> None:
    network = gguf_models.model("llama")
    tensors = {"output_norm.weight": np.full(32, np.nan, np.float32)}
    path = gguf_models.write(tmp_path / "m.gguf", "llama", network, metadata=NO_VOCABULARY, tensors=tensors)
    error = refusal(path)
    assert error.message == f"engine 'llamacpp' cannot serve {path}: its logits are not finite numbers"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_gpu_layers": "3"}, "n_gpu_layers is 3, but the instance runs on the CPU: set its kind to KIND_GPU"),
        ({"type_v": "q8_0", "flash_attn": "off"}, "engine 'llamacpp' cannot serve {path}: "),
    ],
)
def test_arguments_that_llama_cpp_refuses(tmp_path: Path, arguments: dict[str, str], message: str) -> None:
    path = write(tmp_path / "m.gguf", "llama")
    error = refusal(path, arguments=arguments)
    assert error.code is Code.INVALID_ARG
    assert error.message.startswith(message.format(path=path))


def test_build_without_cuda_is_refused_on_a_gpu() -> None:
    error = refusal(demo(), device="cuda")
    assert error.code is Code.UNSUPPORTED
    assert error.message.startswith("engine 'llamacpp' has no support for GPUs")


@pytest.mark.parametrize("arguments", [{"type_k": "q8_0", "type_v": "q8_0"}, {"flash_attn": "off"}, {"n_ubatch": "16"}])
def test_arguments_change_the_computation_a_little(arguments: dict[str, str]) -> None:
    prompt = [504, 3575, 282, 4649, 314]  # The capital of France is
    with opened(demo()) as engine:
        wanted = finished_by_id(engine, request(0, prompt, max_tokens=4, logprobs=0))[0]
    with opened(demo(), arguments=arguments) as engine:
        done = finished_by_id(engine, request(0, prompt, max_tokens=4, logprobs=0))[0]
    assert tokens(done) == tokens(wanted)
    for step, other in zip(done, wanted, strict=True):
        assert step.logprobs is not None and other.logprobs is not None
        assert step.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=0.1)


def test_engines_are_opened_and_closed_one_after_the_other() -> None:
    prompt = [504, 3575, 282, 4649, 314]
    completions = []
    for _ in range(3):
        with opened(demo()) as engine:
            completions.append(tokens(finished_by_id(engine, request(0, prompt, max_tokens=8))[0]))
    assert completions[0] == completions[1] == completions[2]
