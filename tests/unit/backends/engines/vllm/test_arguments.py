"""Settings of a model become engine arguments of vLLM, or the model does not load."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from conch.backends.generation.engine import EngineRequest, EngineSpec
from conch.backends.generation.generation_backend import open_engine
from conch.checkpoints.gguf import GgufFile
from conch.core.errors import Code, ConchError
from conch.core.sampling.parameters import Feature
from conch.core.sampling.parameters import SamplingParams as Sampling
from conch.machine import extras
from tests.fakes.vllm import EngineArgs, LoRARequest, StructuredOutputsConfig, engines
from tests.unit.backends.engines.vllm.conftest import spec
from tests.unit.checkpoints.gguf_files import LLAMA


def test_the_configuration_becomes_engine_arguments(tmp_path: Path) -> None:
    adapters = {}
    for name, rank in (("a", 4), ("b", 20)):
        adapters[name] = tmp_path / name
        adapters[name].mkdir()
        (adapters[name] / "adapter_config.json").write_text(json.dumps({"r": rank}))
    engine = open_engine(
        "vllm",
        spec(
            dtype="bfloat16",
            context=256,
            max_sequences=8,
            max_batched_tokens=1024,
            cache_tokens=1000,
            prefix_caching=False,
            adapters=adapters,
            speculative="draft_model",
            draft=Path("/models/d"),
            draft_tokens=3,
            arguments={"gpu_memory_utilization": 0.5, "max_num_seqs": 4, "disable_log_stats": True, "task": "generate"},
        ),
    )
    assert engines[-1].arguments == EngineArgs(
        model="/models/m",
        tokenizer="/models/m",
        dtype="bfloat16",
        enable_prefix_caching=False,
        scheduling_policy="priority",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=63,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=32,
        speculative_config={"model": "/models/d", "num_speculative_tokens": 3},
        gpu_memory_utilization=0.5,
        structured_outputs_config=StructuredOutputsConfig("guidance"),
    )
    assert engine.warnings == [
        "vllm no longer has the engine argument 'task'; its successor is 'runner': it is ignored"
    ]
    assert (engine.adapters, engine.precision) == (("a", "b"), "bfloat16")
    assert engine.features == frozenset(Feature) - {Feature.BEAMS}
    engine.add(EngineRequest(1, [5], Sampling(lora_name="b")))
    assert engines[-1].requests["1"][2] == LoRARequest("b", 2, str(adapters["b"]))
    with pytest.raises(ConchError, match="is not a LoRA adapter"):
        open_engine("vllm", spec(adapters={"c": tmp_path}))


def test_loads_that_vllm_refuses_are_refused_in_one_sentence() -> None:
    for settings, code, message in (
        ({"arguments": {"no_such": 1}}, Code.INVALID_ARG, "'no_such' is not an engine argument of vLLM"),
        (
            {"arguments": {"swap_spaces": 1}},
            Code.INVALID_ARG,
            "'swap_spaces' is not an engine argument of vLLM; did you mean 'swap_space'?",
        ),
        (
            {"arguments": {"rope_scaling": {"type": "linear"}}},
            Code.INVALID_ARG,
            "vllm no longer has the engine argument 'rope_scaling'; its successor is 'hf_overrides': without it, the "
            "results would be different",
        ),
        ({"dtype": "float64"}, Code.INVALID_ARG, "engine 'vllm' cannot load '/models/m': Unknown dtype: float64"),
        (
            {"arguments": {"tensor_parallel_size": 7}},
            Code.INVALID_ARG,
            "engine 'vllm' cannot load '/models/m': Total number of attention heads (9) must be divisible by tensor "
            "parallel size (7)",
        ),
        (
            {"arguments": {"gpu_memory_utilization": 2.0}},
            Code.INTERNAL,
            "engine 'vllm' failed to load '/models/m': Engine core initialization failed",
        ),
    ):
        with pytest.raises(ConchError) as refused:
            open_engine("vllm", spec(**settings))
        assert (refused.value.code, refused.value.message) == (code, message)


def test_one_library_reads_all_structures() -> None:
    for given, chosen in (
        ({}, StructuredOutputsConfig("guidance")),
        ({"disable_any_whitespace": True}, StructuredOutputsConfig("guidance", disable_any_whitespace=True)),
        ({"backend": "xgrammar"}, StructuredOutputsConfig("xgrammar")),
    ):
        open_engine("vllm", spec(arguments={"structured_outputs_config": given}))
        assert engines[-1].arguments.structured_outputs_config == chosen
    open_engine("vllm", spec())
    assert engines[-1].arguments.structured_outputs_config == StructuredOutputsConfig("guidance")


def test_a_gguf_file_is_named_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    open_engine("vllm", EngineSpec(tmp_path, {}, (), gguf=GgufFile(tmp_path / "m.gguf", 3, {}, {})))
    arguments = engines[-1].arguments
    assert (arguments.model, arguments.tokenizer) == (str(tmp_path / "m.gguf"), str(tmp_path))
    assert arguments.hf_config_path == str(tmp_path)


def test_gguf_file_that_vllm_does_not_read_is_refused_with_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.model_executor.layers.quantization"], "QUANTIZATION_METHODS", ["awq"])
    with pytest.raises(
        ConchError, match="vllm reads no GGUF files without a plugin; set parameter 'engine' to"
    ) as refused:
        open_engine("vllm", EngineSpec(Path("/models"), {}, (), gguf=GgufFile(Path("/models/m.gguf"), 3, LLAMA, {})))
    assert refused.value.code is Code.INVALID_ARG


def test_gguf_model_in_several_files_is_refused_with_other_engines() -> None:
    file = GgufFile(Path("/models/m-1.gguf"), 3, LLAMA, {}, (Path("/models/m-2.gguf"),))
    with pytest.raises(ConchError, match="which is one of 2 files of a model: set parameter 'engine' to '") as refused:
        open_engine("vllm", EngineSpec(Path("/models"), {}, (), gguf=file))
    assert "'transformers'" not in refused.value.message


def test_one_gpu_is_shown_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    open_engine("vllm", spec(device="cuda", device_id=1, arguments={"tensor_parallel_size": 2}))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
    with pytest.raises(ConchError, match=r"^there is no GPU 2: CUDA_VISIBLE_DEVICES is '3,5'$"):
        open_engine("vllm", spec(device="cuda", device_id=2))
    open_engine("vllm", spec(device="cuda", device_id=1))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    open_engine("vllm", spec(device="cuda", device_id=2))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConchError) as refused:
        open_engine("vllm", spec())
    assert refused.value.code is Code.UNSUPPORTED
    assert refused.value.message == f"engine 'vllm' needs vllm: {extras.command('vllm')}"
