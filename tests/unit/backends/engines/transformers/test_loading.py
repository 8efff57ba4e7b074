"""Loading for the engine ``transformers``: precision, adapters, and what is refused in one sentence."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file

from conch.backends.engines.transformers import engine as engine_module
from conch.backends.engines.transformers import network
from conch.backends.engines.transformers.network import DecoderNetwork
from conch.backends.generation.engine import EngineRequest, EngineSpec, GenerationEngine, Progress
from conch.backends.generation.lora import LoraWeights
from conch.checkpoints.gguf import GgufFile, read_gguf
from conch.core.errors import Code, ConchError
from conch.core.sampling.parameters import Feature, SamplingParams
from tests import media_checkpoints
from tests.checkpoints import write_adapter
from tests.refusals import refused
from tests.unit.backends.engines.driving import finished, finished_by_id, generate, tokens
from tests.unit.backends.engines.transformers.models import generated, opened, reference, write


def refusal(folder: Path, **settings: Any) -> ConchError:
    error = refused(opened, folder, **settings)
    assert "\n" not in error.message
    return error


def test_what_cannot_be_loaded_is_refused_in_one_sentence(tmp_path: Path) -> None:
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    error = refusal(unknown)
    assert error.code is Code.INVALID_ARG
    assert error.message.startswith(f"engine 'transformers' cannot load '{unknown}': ")

    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((write(tmp_path / "whole", "llama") / "config.json").read_text())
    assert refusal(empty).message.startswith(f"engine 'transformers' cannot load '{empty}': ")

    partial = write(tmp_path / "partial", "llama")
    weights = load_file(partial / "model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight"
    del weights[lost]
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    assert refusal(partial).message.startswith(
        f"the weights of '{partial}' lack tensors that its results depend on: {lost}; fetch or save"
    )

    other = write(tmp_path / "other", "llama")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    assert "config.json makes [32, 48]" in refusal(other).message


def test_speculative_decoding_is_refused(folder: Path) -> None:
    error = refusal(folder, speculative="ngram")
    assert error.code is Code.INVALID_ARG
    assert error.message == (
        "speculative decoding is not supported by engine 'transformers'; llamacpp, openvino and vllm support it"
    )


def test_arguments_go_to_transformers(folder: Path) -> None:
    eager = opened(folder, arguments={"attn_implementation": "eager"})
    assert generate(eager, [3, 4], temperature=0, max_tokens=8) == generate(
        opened(folder), [3, 4], temperature=0, max_tokens=8
    )
    assert "no_such_argument" in refusal(folder, arguments={"no_such_argument": 1}).message


@pytest.mark.parametrize(
    ("flags", "stored", "wanted"),
    [
        ("fpu amx_bf16", "bfloat16", torch.bfloat16),
        ("fpu avx512_bf16", "bfloat16", torch.bfloat16),
        ("fpu avx512f", "bfloat16", torch.float32),
        ("fpu amx_bf16", "float16", torch.float32),
        ("fpu amx_bf16", "float32", torch.float32),
    ],
)
def test_bfloat16_is_kept_where_the_cpu_multiplies_it(
    flags: str, stored: str, wanted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "cpu_flags", lambda: frozenset(flags.split()))
    folder = write(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    kind = getattr(torch, stored)
    save_file({k: v.to(kind) for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": stored}))
    engine: Any = opened(folder)
    assert engine.precision == str(wanted).removeprefix("torch.")
    assert engine.padded
    assert len(generate(engine, [3, 4], temperature=0, max_tokens=8, ignore_eos=True)) == 8


def test_a_closed_engine_frees_its_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref[Any]] = []

    def load(spec: EngineSpec) -> DecoderNetwork:
        decoder = network.load(spec)
        loaded.append(weakref.ref(decoder.model))
        return decoder

    monkeypatch.setattr(engine_module, "load", load)
    engine = opened(folder)
    engine.add(EngineRequest(0, [3, 4], SamplingParams()))
    engine.step()
    engine.close()
    assert not engine.busy
    gc.collect()
    assert [model() for model in loaded] == [None]


def adapted(folder: Path, target: Path) -> Any:
    """The model of a folder with a random adapter, which is saved in ``target``."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(reference(folder), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(0, 0.5)
    model.save_pretrained(target)
    return model.eval()


def test_adapters_share_a_model_and_not_a_batch(folder: Path, tmp_path: Path) -> None:
    adapters, models = {}, {"": reference(folder)}
    for number, name in enumerate(("first", "second")):
        torch.manual_seed(number)
        adapters[name], models[name] = tmp_path / name, adapted(folder, tmp_path / name)
    engine = opened(folder, adapters=adapters)
    assert engine.adapters == ("first", "second")
    assert Feature.LORA in engine.features
    # Long enough that prefixes are kept: those of one adapter are none of another's.
    prompt = [3 + number % 90 for number in range(40)]
    asked = ["", "first", "second", "first", ""]
    for _ in range(2):
        done = finished_by_id(
            engine,
            *(
                EngineRequest(number, prompt, SamplingParams(max_tokens=8, temperature=0, lora_name=name))
                for number, name in enumerate(asked)
            ),
        )
        for number, name in enumerate(asked):
            assert tokens(done[number]) == generated(models[name], prompt, max_new_tokens=8)[0]
    assert len({tuple(tokens(one)) for one in done.values()}) == 3

    assert Feature.LORA not in opened(folder).features
    error = refusal(folder, adapters={"none": tmp_path / "none"})
    missing = tmp_path / "none"
    assert error.message == f"LoRA adapter 'none' cannot be loaded from '{missing}': it has no adapter_config.json"


def test_adapters_are_attached_between_steps(folder: Path, tmp_path: Path) -> None:
    models = {"": reference(folder)}
    for number, name in enumerate(("fixed", "first", "second")):
        torch.manual_seed(number)
        models[name] = adapted(folder, tmp_path / name)
    engine = opened(folder, adapters={"fixed": tmp_path / "fixed"}, adapter_folders=[tmp_path])
    prompt = [3 + number % 90 for number in range(40)]
    steps: list[Progress] = []
    for number, name in enumerate(models):
        if name in ("first", "second"):
            engine.attach_adapter(name, LoraWeights.read(tmp_path / name))
        engine.add(EngineRequest(number, prompt, SamplingParams(max_tokens=8, temperature=0, lora_name=name)))
        steps += engine.step()
    while engine.busy:
        steps += engine.step()
    for number, name in enumerate(models):
        expected = generated(models[name], prompt, max_new_tokens=8)[0]
        assert [token for step in steps if step.id == number for token in step.tokens] == expected
    engine.detach_adapter("first")
    wide = LoraWeights.read(tmp_path / "second")
    wide.layers["model.embed_tokens"] = next(iter(wide.layers.values()))
    with pytest.raises(ConchError, match=r"weights 'model.embed_tokens.lora_A.weight' that cannot be added"):
        engine.attach_adapter("wide", wide)
    assert (
        tokens(finished(engine, EngineRequest(0, prompt, SamplingParams(max_tokens=8, temperature=0))))
        == (generated(models[""], prompt, max_new_tokens=8)[0])
    )


def as_gguf(folder: Path, target: Path, scaling: str = "", factor: float = 0.0, **tensors: Any) -> GgufFile:
    """The weights of a small Llama's folder as a GGUF file, with a scaling of rotary frequencies and other tensors."""
    gguf = pytest.importorskip("gguf")
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(8)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    if factor:
        writer.add_rope_scaling_factor(factor)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp keeps the halves of rotary pairs next to each other.
            heads = 4 if "q_proj" in name else 2
            shape = (heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
            weight = weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.numpy())
    for name, values in tensors.items():
        writer.add_tensor(name.replace("__", "."), values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (target.parent / "config.json").write_text(json.dumps({**config, "rope_parameters": None}))
    return read_gguf(target)


def test_a_gguf_file_is_loaded(folder: Path, tmp_path: Path) -> None:
    engine = opened(tmp_path, gguf=as_gguf(folder, tmp_path / "tiny.gguf"))
    assert generate(engine, [3, 4, 5], temperature=0, max_tokens=10) == generate(
        opened(folder), [3, 4, 5], temperature=0, max_tokens=10
    )


OLD, NEW = "language_model.model.layers", "model.language_model.layers"


@pytest.mark.parametrize(
    ("names", "place"),
    [
        (OLD, True),
        (NEW, True),
        (NEW.removeprefix("model."), True),
        ("model.language_model.model.layers", True),
        ("language_model.model.levels", False),
        ("transformer.layers", False),
    ],
)
def test_an_adapter_has_the_names_of_any_version_or_is_refused(names: str, place: bool, tmp_path: Path) -> None:
    folder = media_checkpoints.write(tmp_path / "llava", "llava")
    write_adapter(folder, tmp_path / "own", 1)
    tensors = load_file(tmp_path / "own/adapter_model.safetensors")
    tensors = {name.replace(OLD, names): tensor for name, tensor in tensors.items() if OLD in name}
    save_file(tensors, tmp_path / "own/adapter_model.safetensors")
    weights = LoraWeights.read(tmp_path / "own")
    engine = opened(folder, adapter_folders=[tmp_path])
    if not place:
        with pytest.raises(ConchError, match=f"weights '{names}.*that cannot be added"):
            engine.attach_adapter("own", weights)
        assert "does not have its weights" in refusal(folder, adapters={"own": tmp_path / "own"}).message
        return
    engine.attach_adapter("own", weights)
    fixed = opened(folder, adapters={"own": tmp_path / "own"})

    def complete(engine: GenerationEngine, name: str) -> list[int]:
        sampling = SamplingParams(max_tokens=8, temperature=0, lora_name=name)
        return tokens(finished_by_id(engine, EngineRequest(0, [5, 6, 7, 8], sampling))[0])

    assert complete(engine, "own") == complete(fixed, "own") != complete(engine, "")


def test_a_gguf_model_in_several_files_is_refused_with_what_to_do(folder: Path, tmp_path: Path) -> None:
    as_gguf(folder, tmp_path / "tiny.gguf")
    from tests.unit.checkpoints.gguf_splits import split

    file = read_gguf(split(tmp_path / "tiny.gguf", 12))
    assert refusal(tmp_path, gguf=file).message == (
        f"engine 'transformers' cannot load {file.path}, which is one of 2 files of a model: set parameter 'engine' to "
        "'llamacpp', or join them with 'llama-gguf-split --merge'"
    )


def test_a_gguf_file_has_adapters(folder: Path, tmp_path: Path) -> None:
    file = as_gguf(folder, tmp_path / "tiny.gguf")
    model = adapted(folder, tmp_path / "pirate")
    engine = opened(tmp_path, gguf=file, adapters={"pirate": tmp_path / "pirate"})
    expected = {
        name: generated(model, [3, 4, 5], max_new_tokens=8)[0]
        for name, model in (("pirate", model), ("", reference(folder)))
    }
    assert expected["pirate"] != expected[""]
    for name, ids in expected.items():
        sampling = SamplingParams(max_tokens=8, temperature=0, lora_name=name)
        assert tokens(finished(engine, EngineRequest(0, [3, 4, 5], sampling))) == ids


def logprobs(engine: GenerationEngine) -> list[float]:
    sampling = SamplingParams(temperature=0, max_tokens=4, logprobs=0)
    done = finished(engine, EngineRequest(0, [*range(3, 40)], sampling))
    return [token.logprob for progress in done for token in progress.logprobs or ()]


def test_a_gguf_file_scales_rotary_frequencies(tmp_path: Path) -> None:
    scaled = write(
        tmp_path / "scaled",
        "llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    )
    model = reference(scaled)
    frequencies = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    divisors = frequencies / model.model.rotary_emb.inv_freq
    assert divisors.max() > 7
    file = as_gguf(scaled, tmp_path / "tiny.gguf", rope_freqs__weight=divisors)
    assert logprobs(opened(tmp_path, gguf=file)) == pytest.approx(logprobs(opened(scaled)), abs=1e-5)

    wrong = as_gguf(scaled, tmp_path / "wrong.gguf", rope_freqs__weight=torch.ones(3))
    assert (
        "its model has no rotary embedding with the frequencies that it scales" in refusal(tmp_path, gguf=wrong).message
    )


def test_a_gguf_file_scales_all_rotary_frequencies_alike(tmp_path: Path) -> None:
    scaled = write(
        tmp_path / "scaled", "llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    )
    file = as_gguf(scaled, tmp_path / "tiny.gguf", "linear", 4.0)
    assert logprobs(opened(tmp_path, gguf=file)) == pytest.approx(logprobs(opened(scaled)), abs=1e-5)
    plain = as_gguf(scaled, tmp_path / "plain.gguf", "none", 4.0)
    assert logprobs(opened(tmp_path, gguf=plain)) != pytest.approx(logprobs(opened(scaled)), abs=1e-3)


@pytest.mark.parametrize(
    ("scaling", "tensors"), [("yarn", {}), ("longrope", {}), ("longrope", {"rope_factors_long__weight": torch.ones(4)})]
)
def test_another_scaling_of_rotary_frequencies_is_refused(
    folder: Path, tmp_path: Path, scaling: str, tensors: dict[str, Any]
) -> None:
    file = as_gguf(folder, tmp_path / "tiny.gguf", "" if tensors else scaling, 4.0, **tensors)
    assert (
        f"transformers ignores its scaling of rotary frequencies, '{scaling}'" in refusal(tmp_path, gguf=file).message
    )
