"""The engine ``llamacpp`` against a stand-in for the package: what it computes, and what it makes of refusals.

``make test-llamacpp`` tests it with the real llama.cpp.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conch.backends.batching.decoder import Chunk
from conch.backends.engines.llamacpp.decoder import LlamaDecoder
from conch.backends.engines.llamacpp.lora import gguf_adapter
from conch.backends.generation.engine import EngineRequest, EngineSpec, GenerationEngine
from conch.backends.generation.generation_backend import open_engine
from conch.backends.generation.lora import LoraWeights
from conch.backends.generation.media import MediaItem, ProjectorSpec
from conch.checkpoints.gguf import GgufFile, TensorInfo, read_gguf
from conch.core.errors import Code, ConchError
from conch.core.sampling.parameters import SamplingParams
from tests.fakes import llama_cpp, mtmd_cpp
from tests.unit.backends.engines.driving import finished_by_id, tokens
from tests.unit.checkpoints import gguf_files

CONFIG = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
METADATA = {"general.architecture": "llama", "llama.attention.head_count": 4}
F32, I32 = 0, 26


def spec(folder: Path, content: str = "sum", kind: int = F32, **fields: Any) -> EngineSpec:
    path = folder / "model.gguf"
    path.write_text(content)
    tensors = {"blk.0.attn_q.weight": TensorInfo("blk.0.attn_q.weight", (32, 32), kind, 0, 4096)}
    gguf = GgufFile(path, 3, METADATA, tensors)
    return EngineSpec(folder, CONFIG, (2,), **{"gguf": gguf, "threads": 3, "cache_tokens": 512, **fields})


def refusal(folder: Path, content: str = "sum", **fields: Any) -> ConchError:
    with pytest.raises(ConchError) as refused:
        LlamaDecoder(spec(folder, content, **fields))
    return refused.value


def request(id: int, prompt: list[int], **sampling: Any) -> EngineRequest:
    return EngineRequest(id, prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **sampling}))


def best(logits: Any) -> list[int]:
    return [int(token) for token in np.argmax(logits, -1)]


def test_sequences_of_a_step_are_computed_together(tmp_path: Path) -> None:
    decoder = LlamaDecoder(spec(tmp_path))
    logits = decoder.run([Chunk(0, 0, [1, 2]), Chunk(1, 0, [5, 6, 7], wanted=3), Chunk(2, 0, [9], wanted=0)])
    assert logits.shape == (4, decoder.vocabulary)
    assert best(logits) == [3, 5, 11, 18]
    assert best(decoder.run([Chunk(2, 1, [1]), Chunk(0, 2, [4])])) == [10, 7]
    assert decoder.run([Chunk(3, 0, [1], wanted=0)]).shape == (0, decoder.vocabulary)


def test_requests_of_a_batch_get_the_tokens_that_they_get_alone(tmp_path: Path) -> None:
    (tmp_path / "ten.gguf").write_text("10")
    engine = open_engine("llamacpp", spec(tmp_path, adapters={"ten": tmp_path / "ten.gguf"}))
    assert (engine.name, engine.library, engine.adapters) == ("llamacpp", "llama_cpp", ("ten",))
    assert engine.vocabulary == llama_cpp.VOCABULARY
    requests = [
        request(1, [1, 3]),
        request(2, [1, 3, 5], max_tokens=2),
        request(3, [5], lora_name="ten"),
        request(4, [1, 1], ignore_eos=True),
        request(5, [1, 1]),
    ]
    completions = {id: tokens(progress) for id, progress in finished_by_id(engine, *requests).items()}
    # Token 2 ends a sequence.
    assert completions == {1: [4, 8, 16, 32], 2: [9, 18], 3: [15, 30, 20, 0], 4: [2, 4, 8, 16], 5: [2]}
    assert not engine.busy
    engine.close()
    assert llama_cpp.contexts[-1].freed


def test_cancelled_request_leaves_the_batch_and_its_prefix_is_reused(tmp_path: Path) -> None:
    engine = open_engine("llamacpp", spec(tmp_path))
    prompt = [1] * 70
    engine.add(request(1, prompt, max_tokens=100, ignore_eos=True))
    assert tokens(engine.step()) == [30]
    engine.cancel(1)
    assert not engine.busy
    engine.add(request(2, [*prompt, 3]))
    assert tokens(engine.step()) == [33]
    assert engine.usage().prefix_hits == 64


def test_missing_package_is_named_with_how_long_it_takes_to_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ConchError) as refused:
        open_engine("llamacpp", spec(tmp_path))
    assert refused.value.code is Code.UNSUPPORTED
    assert refused.value.message.startswith(
        "engine 'llamacpp' needs llama-cpp-python (pip builds it from source with a C++ compiler, which takes 5 to 10 "
        "minutes on two cores): "
    )
    assert "[llamacpp]" in refused.value.message


def test_slots_share_a_beginning_and_are_shortened(tmp_path: Path) -> None:
    decoder = LlamaDecoder(spec(tmp_path))
    decoder.run([Chunk(0, 0, [1, 2, 3])])
    decoder.share(0, 1, 2, None)
    assert best(decoder.run([Chunk(1, 2, [10]), Chunk(0, 3, [1])])) == [13, 7]
    decoder.truncate(0, 1)
    assert best(decoder.run([Chunk(0, 1, [4])])) == [5]
    decoder.truncate(1, 0)
    assert best(decoder.run([Chunk(1, 0, [8])])) == [8]


def test_tokens_of_a_slot_are_saved_and_restored(tmp_path: Path) -> None:
    decoder = LlamaDecoder(spec(tmp_path, cache_tokens=512))
    decoder.run([Chunk(0, 0, [1, 2, 3])])
    saved = decoder.save(0)
    assert saved is not None
    decoder.truncate(0, 0)
    assert decoder.restore(5, saved, 3, [])
    assert best(decoder.run([Chunk(5, 3, [4])])) == [10]
    assert decoder.restore(6, saved, 2, [])
    assert best(decoder.run([Chunk(6, 2, [4])])) == [7]
    decoder.run([Chunk(0, 0, [1] * 504)])
    assert not decoder.restore(1, saved, 3, [])


def test_saved_tokens_of_a_model_with_a_window_are_those_that_a_shorter_sequence_needs(tmp_path: Path) -> None:
    decoder = LlamaDecoder(spec(tmp_path, "window"))
    prompt = [index % 7 for index in range(40)]
    decoder.run([Chunk(0, 0, prompt)])
    saved = decoder.save(0)
    assert saved is not None
    decoder.truncate(0, 0)
    for slot, length in enumerate((40, 33, 16, 5)):
        assert decoder.restore(slot, saved, length, [])
        expected = sum(prompt[:length]) + sum([*prompt[:length], 1][-llama_cpp.WINDOW :]) + 1
        assert best(decoder.run([Chunk(slot, length, [1])])) == [expected % llama_cpp.VOCABULARY]


def test_a_sequence_does_not_continue_after_tokens_whose_cells_have_others(tmp_path: Path) -> None:
    decoder = LlamaDecoder(spec(tmp_path, "window"))
    decoder.run([Chunk(0, 0, [1] * 40)])
    llama_cpp.contexts[-1].windows[0] -= set(range(10))
    held = {length: decoder.holds(0, length) for length in (40, 18, 17, 5)}
    assert held == {40: True, 18: True, 17: False, 5: False}
    saved = decoder.save(0)
    assert saved is not None
    decoder.truncate(0, 0)
    assert {length: decoder.restore(1, saved, length, []) for length in held} == held


@pytest.mark.parametrize(
    ("arguments", "size"),
    [({}, 512 * 256), ({"cache_ram": 3}, 3 << 20), ({"cache_ram": "0"}, 0), ({"kv_unified": "false"}, 0)],
)
def test_saved_tokens_have_a_limit(tmp_path: Path, arguments: dict[str, Any], size: int) -> None:
    decoder = LlamaDecoder(spec(tmp_path, cache_tokens=512, max_sequences=1, arguments=arguments))
    assert (decoder.token_bytes, decoder.saved_bytes) == (256, size)
    assert decoder.retained_tokens == (0 if size else None)
    if size:
        decoder.saved_bytes = 2
        decoder.run([Chunk(0, 0, [1, 2, 3])])
        assert decoder.save(0) is None


def test_a_negative_memory_for_saved_tokens_is_refused(tmp_path: Path) -> None:
    refused = refusal(tmp_path, arguments={"cache_ram": -1})
    assert refused.message == "parameter 'cache_ram' is -1; it must be at least 0 (MiB)"


def test_limits_are_those_of_the_file_the_library_and_the_parameters(tmp_path: Path) -> None:
    decoder = LlamaDecoder(spec(tmp_path, context=100, cache_tokens=300, max_sequences=4, max_batched_tokens=64))
    assert (decoder.context, decoder.blocks, decoder.slots, decoder.batched_tokens) == (100, 16, 63, 64)
    assert decoder.token_bytes == 2 * 32 * 2 * 2
    assert decoder.precision == "F32 (KV cache f16)"
    parameters = llama_cpp.contexts[-1].parameters
    assert (parameters.n_seq_max, parameters.n_batch, parameters.n_ubatch) == (64, 64, 64)
    assert (parameters.n_threads, parameters.n_threads_batch) == (3, 3)
    assert (parameters.kv_unified, decoder.retained_tokens) == (True, 0)
    assert LlamaDecoder(spec(tmp_path)).context == llama_cpp.CONTEXT
    most = f"parameter 'max_num_seqs' is 65; llama.cpp has at most {llama_cpp.SEQUENCES} sequences"
    assert refusal(tmp_path, max_sequences=65).message == most


def test_each_sequence_has_a_cache_of_its_own_if_results_must_not_depend_on_others(tmp_path: Path) -> None:
    decoder = LlamaDecoder(spec(tmp_path, cache_tokens=2048, max_sequences=5, batch_invariant=True))
    assert (decoder.slots, decoder.context, decoder.blocks * decoder.block_tokens) == (5, 409, 5 * 512)
    parameters = llama_cpp.contexts[-1].parameters
    assert (parameters.n_seq_max, parameters.n_ctx, parameters.kv_unified) == (5, 5 * 512, False)


def test_rows_of_separate_caches_come_in_the_order_of_the_chunks(tmp_path: Path) -> None:
    decoder = LlamaDecoder(spec(tmp_path, cache_tokens=2048, max_sequences=4, arguments={"kv_unified": "False"}))
    parameters = llama_cpp.contexts[-1].parameters
    assert (decoder.slots, parameters.n_seq_max, parameters.kv_unified) == (4, 4, False)
    logits = decoder.run([Chunk(2, 0, [9]), Chunk(3, 0, [1], wanted=0), Chunk(0, 0, [5, 6, 7], wanted=2)])
    assert best(logits) == [9, 11, 18]


def test_slots_of_a_recurrent_model_are_the_sequences_of_the_batch(tmp_path: Path) -> None:
    decoder = LlamaDecoder(spec(tmp_path, "recurrent", max_sequences=3))
    assert not decoder.rewinds
    assert (decoder.slots, decoder.token_bytes, decoder.precision) == (3, 0, "F32")
    assert decoder.blocks * decoder.block_tokens >= 3 * llama_cpp.CONTEXT


def test_adapters_apply_to_a_run(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_text("1")
    (tmp_path / "ten.gguf").write_text("10")
    decoder = LlamaDecoder(spec(tmp_path, adapters={"one": tmp_path / "one.gguf", "ten": tmp_path / "ten.gguf"}))
    assert decoder.adapters == ("one", "ten")
    runs = [best(decoder.run([Chunk(slot, 0, [5])], name)) for slot, name in enumerate(("one", "", "ten", "ten"))]
    assert runs == [[6], [5], [15], [15]]


def peft(layer: str = "model.layers.0.self_attn.q_proj", columns: int = 32) -> LoraWeights:
    """An adapter whose matrix B has the number of the row in every place."""
    up = np.repeat(np.arange(32, dtype=np.float32)[:, None], 2, axis=1)
    return LoraWeights(
        Path("/adapters/red/adapter_model.safetensors"), {layer: (np.ones((2, columns), np.float32), up)}
    )


def test_adapters_of_peft_come_and_go_between_runs(tmp_path: Path) -> None:
    decoder = LlamaDecoder(spec(tmp_path))
    for slot in range(2):
        decoder.attach_adapter("red", peft())
        assert best(decoder.run([Chunk(slot, 0, [5])], "red")) == [5 + 2]  # two matrices
        decoder.detach_adapter("red")
        assert best(decoder.run([Chunk(slot, 1, [5])])) == [10]


def test_rows_of_queries_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "adapter.gguf"
    gguf = spec(tmp_path).gguf
    assert gguf is not None
    path.write_bytes(gguf_adapter(peft(), gguf))
    written = read_gguf(path)
    assert (written.text("general.type"), written.text("adapter.type")) == ("adapter", "lora")
    up = written.tensors["blk.0.attn_q.weight.lora_b"]
    assert up.shape == (32, 2)
    rows = np.fromfile(path, np.float32, 64, offset=up.offset).reshape(32, 2)[:, 0]
    # Heads of 8 rows: those that are rotated together are 4 apart in a checkpoint.
    assert rows[:8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert rows[8:16].tolist() == [8, 12, 9, 13, 10, 14, 11, 15]


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (peft("model.embed_tokens"), "has weights 'model.embed_tokens.lora_A.weight' that cannot be added"),
        (peft("model.layers.7.self_attn.q_proj"), "layers.7.self_attn.q_proj.lora_A.weight' that cannot be added"),
        (peft(columns=8), "the matrices of 'model.layers.0.self_attn.q_proj' have a different size"),
    ],
)
def test_adapter_of_peft_that_does_not_fit_is_refused(tmp_path: Path, adapter: LoraWeights, message: str) -> None:
    with pytest.raises(ConchError) as refused:
        LlamaDecoder(spec(tmp_path)).attach_adapter("red", adapter)
    assert refused.value.code is Code.INVALID_ARG
    assert refused.value.message.startswith("LoRA adapter /adapters/red")
    assert message in refused.value.message


def test_an_adapter_that_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_text("broken")
    unknown = GgufFile(tmp_path / "model.gguf", 3, {"general.architecture": "mamba"}, {})
    assert refusal(tmp_path, adapters={"a": tmp_path / "none"}, gguf=unknown).message == (
        f"engine 'llamacpp' cannot serve {tmp_path / 'model.gguf'}: LoRA adapter {tmp_path / 'none'} is not a GGUF "
        "file, and those of PEFT are not converted for the architecture 'mamba': convert it with llama.cpp's "
        "convert_lora_to_gguf.py"
    )
    assert refusal(tmp_path, adapters={"a": tmp_path / "broken.gguf"}).message == (
        f"LoRA adapter {tmp_path / 'broken.gguf'}: lora tensor 'a' has unexpected suffix"
    )


def test_arguments_go_to_the_library(tmp_path: Path) -> None:
    LlamaDecoder(spec(tmp_path, arguments={"n_ubatch": "32", "type_k": "q8_0", "type_v": "Q4_0", "flash_attn": "on"}))
    parameters = llama_cpp.contexts[-1].parameters
    assert (parameters.n_ubatch, parameters.type_k, parameters.type_v, parameters.flash_attn_type) == (32, 8, 2, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gguf": None}, "engine 'llamacpp' needs a GGUF file: {folder} has none"),
        (
            {"kind": I32},
            "engine 'llamacpp' cannot serve {file}: matrix 'blk.0.attn_q.weight' is of type I32, which no model has",
        ),
        (
            {"arguments": {"n_gpu_layers": "4"}},
            "n_gpu_layers is 4, but the instance runs on the CPU: set its kind to KIND_GPU",
        ),
        ({"arguments": {"n_ubatch": "many"}}, "parameter 'n_ubatch' is 'many'; it must be a whole number"),
        (
            {"arguments": {"flash_attn": "yes"}},
            "parameter 'flash_attn' is 'yes'; it must be one of auto, off, on",
        ),
        (
            {"arguments": {"type_v": "q4_0", "flash_attn": "off"}},
            "engine 'llamacpp' cannot serve {file}: V cache quantization requires flash_attn",
        ),
        ({"content": "refused"}, "engine 'llamacpp' cannot load {file}: tensor 'a' not found"),
        ({"content": "nan"}, "engine 'llamacpp' cannot serve {file}: its logits are not finite numbers"),
        (
            {"content": "encoder"},
            "engine 'llamacpp' cannot load {file}: a model of kind 'llama' does not write token after token",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    error = refusal(tmp_path, **fields)
    assert error.code is Code.INVALID_ARG
    assert error.message == message.format(folder=tmp_path, file=tmp_path / "model.gguf")


def test_a_gpu_needs_a_library_that_was_built_for_it(tmp_path: Path) -> None:
    error = refusal(tmp_path, device="cuda")
    assert error.code is Code.UNSUPPORTED
    assert "reinstall llama-cpp-python with CMAKE_ARGS=-DGGML_CUDA=on" in error.message


def test_a_step_that_does_not_fit_breaks_the_engine(tmp_path: Path) -> None:
    decoder = LlamaDecoder(spec(tmp_path, cache_tokens=256, max_batched_tokens=300))
    with pytest.raises(ConchError, match="the KV cache has no room for the batch"):
        decoder.run([Chunk(0, 0, [1] * 300)])
    with pytest.raises(ConchError, match="invalid input batch"):
        decoder.run([Chunk(1, 7, [1])])
    with pytest.raises(ConchError, match="a step has more than 300 tokens"):
        decoder.run([Chunk(1, 0, [1] * 301)])


def test_memory_is_freed_when_the_model_is_unloaded(tmp_path: Path) -> None:
    decoder = LlamaDecoder(spec(tmp_path))
    context = llama_cpp.contexts[-1]
    decoder.close()
    decoder.close()
    assert context.freed
    assert context.model.freed


def with_projector(folder: Path, architecture: str = "clip", **values: str) -> dict[str, Any]:
    path = folder / "mmproj.gguf"
    path.write_bytes(gguf_files.content({"general.architecture": architecture, **values}))
    return {"projector": ProjectorSpec(path, 1000)}


def picture(engine: GenerationEngine, number: int, size: int = 1) -> MediaItem:
    assert engine.preparer is not None
    return engine.preparer.prepare("image", bytes([number] * 32), Image.new("RGB", (size, size), (number, 0, 0)))


@pytest.mark.parametrize("speculative", ["", "ngram"])
def test_image_is_read_in_the_place_of_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculative: str
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp.mtmd_cpp", mtmd_cpp)
    engine = open_engine(
        "llamacpp", spec(tmp_path, **with_projector(tmp_path), max_batched_tokens=8, speculative=speculative)
    )
    assert engine.media == {"image"} and not engine.warnings
    first, second = picture(engine, 3), picture(engine, 5)
    (start, *places), (_, *others) = first.arrays["tokens"].tolist(), second.arrays["tokens"].tolist()
    assert (start, first.tokens) == (1, 2) and max(*places, *others) < 0 and places != others
    prompt = [*[0] * 6, 1, *places, 1, *others, 4]
    finished = finished_by_id(
        engine,
        EngineRequest(
            1, prompt, SamplingParams(temperature=0, max_tokens=2, presence_penalty=0.1), media=[first, second]
        ),
        request(2, [1, 3], max_tokens=2),
    )
    # An image becomes two vectors that count as its number.
    assert {id: tokens(steps) for id, steps in finished.items()} == {1: [22, 4], 2: [4, 8]}
    context = llama_cpp.contexts[-1]
    assert context.causal == [False, True] * 2
    for wrong, reason in ((prompt[:-1], "ends with an image"), (prompt[:8] + [4], "as a whole"), ([4], "all of its")):
        with pytest.raises(ConchError, match=reason):
            engine.add(EngineRequest(3, wrong, SamplingParams(), media=[first, second]))
    with pytest.raises(ConchError, match="input 'image' cannot be processed for the model"):
        picture(engine, 0)
    del first, second
    last = picture(engine, 7)
    engine.add(
        EngineRequest(
            4, [*last.arrays["tokens"].tolist(), 4], SamplingParams(temperature=0, max_tokens=1), media=[last]
        )
    )
    del last  # a running sequence keeps its images
    assert tokens(finished_by_id(engine)[4]) == [19]
    engine.close()


@pytest.mark.parametrize(
    ("architecture", "values", "reason"),
    [
        ("llama", {}, "mmproj.gguf is not a multimodal projector (mmproj)"),
        ("clip", {"clip.projector_type": "hunyuanvl"}, "of type 'hunyuanvl', which is not supported"),
        ("clip", {}, "llama-cpp-python was built without libmtmd"),
    ],
)
def test_model_whose_projector_does_not_load_reads_texts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, values: dict[str, str], reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp.mtmd_cpp", None if "libmtmd" in reason else mtmd_cpp)
    engine = open_engine("llamacpp", spec(tmp_path, **with_projector(tmp_path, architecture, **values)))
    assert not engine.media and engine.preparer is None
    assert engine.warnings[0].startswith("it reads only text: ") and reason in engine.warnings[0]
    assert tokens(finished_by_id(engine, request(1, [1, 3]))[1]) == [4, 8, 16, 32]
