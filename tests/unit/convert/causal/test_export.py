"""Exports of tiny language models, against torch and in the pipeline that serves them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("openvino")

import openvino
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PersimmonConfig,
    PreTrainedConfig,
    Qwen2Config,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.convert.causal.agreement import ServedGraph
from conch.convert.causal.conversion import write_weights
from conch.convert.causal.export import CausalNetwork, StatefulGraph, export, load, verify
from conch.core.errors import Code, ConchError
from tests.convert_checkpoints import SIZES

GPT2 = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=80, bos_token_id=0, eos_token_id=1)
ENDS = {"bos_token_id": 0, "eos_token_id": 1}
FALCON = FalconConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **ENDS)
FAMILIES = [
    LlamaConfig(**SIZES, num_key_value_heads=2, **ENDS),
    Qwen2Config(**SIZES, num_key_value_heads=2, **ENDS),
    GPT2,
    FALCON,
    PersimmonConfig(**SIZES, **ENDS),
    MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8, **ENDS),
    Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        **ENDS,
    ),
]
WINDOWED = FAMILIES[-2]


def network(config: PreTrainedConfig) -> CausalNetwork:
    torch.manual_seed(7)
    module: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return CausalNetwork(module)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_an_export_says_in_the_serving_pipeline_what_torch_says(config: PreTrainedConfig, tmp_path: Path) -> None:
    made = network(config)
    file = write_weights(export(made), tmp_path / "openvino-fp32", "fp32", [])
    prompts = np.random.default_rng(7).integers(2, 99, (2, 12)).tolist()

    served = ServedGraph(file, "fp32", config.to_dict(), cache_tokens=512, threads=1)

    assert served.greedy(prompts, 20) == made.greedy(prompts, 20)
    text = prompts[0]
    np.testing.assert_allclose(served.logits(np.array([text])), made.logits(np.array([text])), atol=1e-3)
    assert len(served.decode(prompts, 3)) == len(made.decode(prompts, 3)) == 3
    assert served.prefill(text) > 0 and made.prefill(text) > 0


def test_a_graph_keeps_its_cache_until_it_is_reset() -> None:
    made = network(FAMILIES[0])
    graph = StatefulGraph(export(made))
    ids = np.random.default_rng(7).integers(2, 99, (1, 9))

    whole = graph.run(ids)
    graph.reset()
    parts = [graph.run(ids[:, :4]), graph.run(ids[:, 4:])]

    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=1e-4)


def test_verification_notices_another_network() -> None:
    model = export(network(FAMILIES[0]))

    with pytest.raises(ConchError, match=r"logits differ from torch's") as caught:
        verify(model, network(FAMILIES[1]))
    assert caught.value.code is Code.INTERNAL


def test_a_window_that_paging_would_lose_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conch.convert.causal.export.additive_masks", nullcontext)

    with pytest.raises(ConchError, match=r"has windows 0 \(2 layers\) instead of 8 \(2 layers\)") as caught:
        export(network(WINDOWED))
    assert caught.value.code is Code.UNSUPPORTED


def test_masks_are_as_before_after_an_export() -> None:
    made = network(WINDOWED)
    ids = np.random.default_rng(7).integers(2, 99, (2, 20))
    before = made.logits(ids)

    export(made)

    np.testing.assert_array_equal(made.logits(ids), before)
    assert "_additive" not in repr(ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@pytest.mark.parametrize(("precision", "kinds"), [("fp16", {"f16"}), ("int8", {"u8"}), ("int4", {"u4", "u8"})])
def test_weights_are_stored_in_fewer_bits(precision: str, kinds: set[str], tmp_path: Path) -> None:
    file = write_weights(export(network(FAMILIES[0])), tmp_path / "m", precision, [])

    model: Any = openvino.Core().read_model(file)
    types = {node.get_element_type().get_type_name() for node in model.get_ops() if node.get_type_name() == "Constant"}
    assert kinds <= types
    assert {port.get_any_name() for port in model.inputs} == {"input_ids", "attention_mask", "position_ids", "beam_idx"}
    assert [port.get_any_name() for port in model.outputs] == ["logits"]


def test_calibrated_weights_need_texts(tmp_path: Path) -> None:
    made = network(FAMILIES[0])
    texts = np.random.default_rng(7).integers(2, 99, (3, 12)).tolist()

    assert write_weights(export(made), tmp_path / "m", "int4-awq", texts).is_file()
    with pytest.raises(ConchError, match="calibration texts"):
        write_weights(export(made), tmp_path / "n", "int4-awq", [])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (FalconConfig(**{**FALCON.to_dict(), "alibi": True}), "encodes positions with ALiBi"),
        (BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4, **ENDS), "the attention of a 'bloom'"),
        (MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, **ENDS), "a 'mamba'|kind mamba"),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, **ENDS),
            r"its positions \('dynamic'\)",
        ),
    ],
    ids=["alibi", "no-sdpa", "no-keys", "dynamic-rope"],
)
def test_what_cannot_be_paged_is_to_be_served_as_it_is(config: PreTrainedConfig, said: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path, str(tmp_path), "", config.to_dict(), Options(), task="text-generation")

    with pytest.raises(ConchError, match=f"({said}).*: serve the checkpoint directly") as caught:
        load(checkpoint)
    assert caught.value.code is Code.UNSUPPORTED
