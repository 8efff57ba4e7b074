"""The decoder over OpenVINO's paged attention: sequences in chunks, shared blocks, heads, adapters, refused graphs."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openvino")
pytest.importorskip("torch")

import openvino
import torch
from openvino import opset13 as ops
from safetensors.torch import save_file

from conch.backends.batching.decoder import Chunk
from conch.backends.batching.kv_blocks import KvBlocks
from conch.backends.engines.openvino.decoder import OpenVinoDecoder, capabilities
from conch.core.errors import Code, ConchError
from tests.unit.backends.engines.openvino.models import SIZES, VOCABULARY, greedy, prompts, spec


@pytest.fixture(scope="module")
def decoder(directory: Path) -> OpenVinoDecoder:
    return OpenVinoDecoder(spec(directory))


def expected_logits(module: Any, ids: list[int]) -> Any:
    with torch.no_grad():
        return module(torch.tensor([ids])).logits[0].numpy()


class Sequences:
    """Sequences by slot that read their tokens in chunks, with the blocks that they need."""

    def __init__(self, decoder: OpenVinoDecoder) -> None:
        self.decoder, self.blocks = decoder, KvBlocks(decoder.blocks, decoder.block_tokens)
        self.tokens: dict[int, list[int]] = {}
        self.read: dict[int, int] = {}

    def add(self, slot: int, tokens: list[int], read: int = 0) -> None:
        self.tokens[slot], self.read[slot] = list(tokens), read

    def share(self, source: int, target: int, tokens: int) -> None:
        fits, copied = self.blocks.share(source, target, tokens)
        assert fits
        self.decoder.share(source, target, tokens, copied)

    def step(self, sizes: dict[int, int], adapter: str = "") -> None:
        """Read at most so many tokens of each slot, and append the likeliest next one where all are read."""
        chunks = []
        for slot, size in sizes.items():
            start = self.read[slot]
            ids = self.tokens[slot][start : start + size]
            end = self.read[slot] = start + len(ids)
            assert self.blocks.reserve(slot, end)
            chunks.append(Chunk(slot, start, ids, int(end == len(self.tokens[slot])), self.blocks.blocks(slot)))
        logits = self.decoder.run(chunks, adapter)
        done = [chunk.slot for chunk in chunks if chunk.wanted]
        assert logits.shape == (len(done), VOCABULARY) and logits.dtype == np.float32
        for slot, row in zip(done, logits, strict=True):
            self.tokens[slot].append(int(row.argmax()))


def test_sequences_in_chunks_give_the_tokens_of_transformers(decoder: OpenVinoDecoder, module: Any) -> None:
    source, sequences, asked = random.Random(7), Sequences(decoder), prompts(12)
    for slot, prompt in enumerate(asked):
        sequences.add(slot, prompt)
    going = set(range(len(asked)))
    while going:
        sequences.step({slot: source.randrange(1, 40) for slot in going if source.random() < 0.7} or {min(going): 1})
        going = {slot for slot in going if len(sequences.tokens[slot]) < len(asked[slot]) + 16}
    for slot, prompt in enumerate(asked):
        made = sequences.tokens[slot][len(prompt) :]
        # ``generate`` stops at the end of the text.
        wanted = greedy(module, prompt, 16)
        assert made[: len(wanted)] == wanted


def test_logits_of_several_tokens_or_none(decoder: OpenVinoDecoder, module: Any) -> None:
    first, second = prompts(2, seed=3)
    chunks = [Chunk(0, 0, first, 3, range(3)), Chunk(1, 0, second, 0, range(3, 6)), Chunk(2, 0, second, 1, range(6, 9))]
    logits = decoder.run(chunks)
    wanted = np.concatenate([expected_logits(module, first)[-3:], expected_logits(module, second)[-1:]])
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    logits[:] = 0  # the caller may overwrite them
    assert decoder.run([Chunk(0, len(first), [5], 0, range(3))]).shape == (0, VOCABULARY)


@pytest.mark.parametrize("dtype", ["float32", "auto", "bfloat16"])
def test_shared_prefixes_are_those_of_their_source(directory: Path, dtype: str) -> None:
    if dtype == "bfloat16" and "BF16" not in capabilities():
        pytest.skip("this CPU does not compute in bfloat16")
    decoder = OpenVinoDecoder(spec(directory, dtype=dtype))
    sequences, [prompt] = Sequences(decoder), [ids for ids in prompts(9) if len(ids) > 70][:1]
    sequences.add(0, prompt)
    sequences.step({0: len(prompt)})
    for slot, tokens in ((1, 64), (2, 50)):
        sequences.share(0, slot, tokens)
        sequences.add(slot, prompt, read=tokens)
    # The copies write into their own last block.
    sequences.add(3, [*prompt[:50], *prompt[:20]], read=50)
    sequences.share(0, 3, 50)
    for _ in range(8):
        sequences.step(dict.fromkeys(range(4), 100))
    shortest = min(len(sequences.tokens[slot]) for slot in (0, 1, 2))
    assert sequences.tokens[1][:shortest] == sequences.tokens[0][:shortest] == sequences.tokens[2][:shortest]


def changed(directory: Path, folder: Path, change: Any) -> Path:
    """A copy of the graph whose logits are ``change(logits)``."""
    model: Any = openvino.Core().read_model(directory / "openvino_model.xml")
    result = model.output("logits").get_node()
    source = result.input_value(0)
    names = source.get_names()
    source.get_tensor().set_names(set())
    new = change(source)
    new.output(0).get_tensor().set_names(names)
    result.input(0).replace_source_output(new.output(0))
    model.validate_nodes_and_infer_types()
    openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


def test_heads_with_a_soft_cap_or_of_an_unknown_form(directory: Path, module: Any, tmp_path: Path) -> None:
    prompt = prompts(1)[0]
    wanted = expected_logits(module, prompt)[-2:]
    three = np.float32(3)

    def cap(logits: Any) -> Any:
        return ops.add(ops.multiply(ops.tanh(ops.divide(logits, ops.constant(three))), ops.constant(three)), three)

    for name, change, expected in (
        ("capped", cap, np.tanh(wanted / 3) * 3 + 3),
        ("unknown", ops.relu, np.maximum(wanted, 0)),
        ("twice", lambda logits: ops.add(logits, ops.sin(logits)), wanted + np.sin(wanted)),
    ):
        (tmp_path / name).mkdir()
        decoder = OpenVinoDecoder(spec(changed(directory, tmp_path / name, change)))
        logits = decoder.run([Chunk(0, 0, prompt, 2, range(-(-len(prompt) // 32)))])
        np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_graphs_with_other_inputs_are_refused_by_name(directory: Path, tmp_path: Path) -> None:
    model: Any = openvino.Core().read_model(directory / "openvino_model.xml")
    kinds = ops.parameter([-1, -1], openvino.Type.i64, name="token_type_ids")
    kinds.output(0).get_tensor().set_names({"token_type_ids"})
    model.add_parameters([kinds])
    openvino.save_model(model, tmp_path / "openvino_model.xml")
    with pytest.raises(ConchError, match=r"its graph has an input 'token_type_ids' of 2 dimensions") as refused:
        OpenVinoDecoder(spec(tmp_path))
    assert refused.value.code is Code.INVALID_ARG


def test_graphs_with_a_state_of_another_kind_are_refused(directory: Path, tmp_path: Path) -> None:
    """All sequences would share it."""
    model: Any = openvino.Core().read_model(directory / "openvino_model.xml")
    reader = model.output("logits").get_node().input(0)
    names = reader.get_source_output().get_names()
    reader.get_source_output().get_tensor().set_names(set())
    state = ops.read_value(ops.constant(np.zeros((1, 1, VOCABULARY), np.float32)), "recurrent.0")
    changed = ops.add(state, reader.get_source_output())
    changed.output(0).get_tensor().set_names(names)
    reader.replace_source_output(changed.output(0))
    last = ops.gather(changed, ops.constant(np.array([-1])), ops.constant(np.int64(1)))
    model.add_sinks([ops.assign(last, "recurrent.0")])
    openvino.save_model(model, tmp_path / "openvino_model.xml", compress_to_fp16=False)
    with pytest.raises(ConchError, match=r"state other than the KV cache of attention, 'recurrent\.0'") as refused:
        OpenVinoDecoder(spec(tmp_path))
    assert refused.value.code is Code.INVALID_ARG


def test_graphs_without_a_cache_are_refused(tmp_path: Path) -> None:
    ids = ops.parameter([-1, -1], openvino.Type.i64, name="input_ids")
    ids.output(0).get_tensor().set_names({"input_ids"})
    openvino.save_model(openvino.Model([ops.result(ids)], [ids], "none"), tmp_path / "openvino_model.xml")
    with pytest.raises(ConchError, match=r"engine 'openvino' cannot load .*") as refused:
        OpenVinoDecoder(spec(tmp_path))
    assert refused.value.code is Code.INVALID_ARG


LAYERS = tuple(
    f"model.layers.{layer}.{name}"
    for layer in range(SIZES["num_hidden_layers"])
    for name in ("self_attn.q_proj", "mlp.down_proj")
)


def adapter(module: Any, folder: Path, layers: tuple[str, ...], dtype: torch.dtype, rank: int, **config: Any) -> Any:
    """Write an adapter, and return the network with its weights merged."""
    merged, tensors = copy.deepcopy(module), {}
    torch.manual_seed(rank)
    for layer in layers:
        weight = merged.get_submodule(layer).weight
        down, up = (
            (torch.randn(shape) * 0.3).to(dtype) for shape in ((rank, weight.shape[1]), (weight.shape[0], rank))
        )
        tensors[f"base_model.model.{layer}.lora_A.weight"] = down
        tensors[f"base_model.model.{layer}.lora_B.weight"] = up
        weight.data += 2 * up.float() @ down.float()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, **config}))
    return merged


def test_adapters_of_several_ranks_share_the_weights(directory: Path, module: Any, tmp_path: Path) -> None:
    networks = {
        "": module,
        "all": adapter(module, tmp_path / "all", LAYERS, torch.bfloat16, 4, lora_alpha=8),
        "some": adapter(module, tmp_path / "some", LAYERS[1:2], torch.float16, 16, lora_alpha=8, use_rslora=True),
        "head": adapter(
            module, tmp_path / "head", ("lm_head",), torch.float32, 2, lora_alpha=1, alpha_pattern={"lm_head": 4}
        ),
    }
    decoder = OpenVinoDecoder(spec(directory, adapters={name: tmp_path / name for name in networks if name}))
    assert decoder.adapters == ("all", "some", "head")
    for name, network in [*networks.items(), *networks.items()]:
        for prompt in prompts(3):
            logits = decoder.run([Chunk(0, 0, prompt, 1, range(-(-len(prompt) // 32)))], name)
            np.testing.assert_allclose(logits[0], expected_logits(network, prompt)[-1], atol=1e-3)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (
            {"model.other.lora_A": (4, 64), "model.other.lora_B": (64, 4)},
            {},
            r"other\.lora_A\.weight' that cannot be added",
        ),
        ({"lm_head.lora_magnitude_vector": (4, 64)}, {}, r"lora_magnitude_vector\.weight' that cannot"),
        ({"lm_head.lora_A": (4, 64)}, {}, "the matrices of 'lm_head' do not match"),
        ({"lm_head.lora_A": (4, 64), "lm_head.lora_B": (99, 4)}, {}, "the matrices of 'lm_head' have a different size"),
        ({}, {"use_dora": True}, "use_dora is not supported"),
        ({}, {"lora_alpha": None}, "must have a number 'lora_alpha'"),
        ({}, {"alpha_pattern": {"lm_(head": 4}}, "alpha_pattern has an invalid expression: missing \\)"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    directory: Path, tmp_path: Path, tensors: dict[str, tuple[int, ...]], config: dict[str, Any], message: str
) -> None:
    named = {f"base_model.model.{name}.weight": torch.zeros(shape) for name, shape in tensors.items()}
    save_file(named, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, **config}))
    with pytest.raises(ConchError, match=message) as refused:
        OpenVinoDecoder(spec(directory, adapters={"french": tmp_path}))
    assert refused.value.code is Code.INVALID_ARG


def test_adapter_that_is_no_safetensors_file_is_refused(directory: Path, tmp_path: Path) -> None:
    for content in (b"", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0[1,2,3] "):
        (tmp_path / "adapter_model.safetensors").write_bytes(content)
        with pytest.raises(ConchError, match="is not a safetensors file of floating-point numbers"):
            OpenVinoDecoder(spec(directory, adapters={"french": tmp_path}))
