"""Tiny causal language models with random weights, and the engine over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from conch.backends.generation.engine import EngineSpec, GenerationEngine
from conch.backends.generation.generation_backend import open_engine

VOCABULARY: Final = 96
_SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA: Final = {"num_key_value_heads": 2, "intermediate_size": 64}
#: By name: transformers' class of configurations, and what differs.
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("LlamaConfig", _LLAMA),
    "qwen2": ("Qwen2Config", _LLAMA),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": 6}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_LLAMA,
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "falcon": ("FalconConfig", {"multi_query": True, "new_decoder_architecture": False, "alibi": False}),
    "falcon-alibi": (
        "FalconConfig",
        {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True, "tie_word_embeddings": False},
    ),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "persimmon": ("PersimmonConfig", {"intermediate_size": 64}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("GPTNeoXConfig", {"intermediate_size": 64}),
    "gpt_neo": (
        "GPTNeoConfig",
        {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 6},
    ),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "mixtral": ("MixtralConfig", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mamba": ("MambaConfig", {"state_size": 8}),
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 32, "context_length": 256}),
    "phi3-longrope": (
        "Phi3Config",
        {
            **_LLAMA,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.0, 1.0, 1.0],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "factor": 16.0,
            },
        },
    ),
}


def write(folder: Path, name: str, **settings: Any) -> Path:
    """The checkpoint of a model of ``MODELS`` in ``folder``."""
    kind, differing = MODELS[name]
    config = getattr(transformers, kind)(**{**_SIZES, **differing, **settings})
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    return folder


def spec(folder: Path, **settings: Any) -> EngineSpec:
    config = json.loads((folder / "config.json").read_text())
    return EngineSpec(folder, config, **{"eos_ids": (2,), "threads": 1, **settings})


def opened(folder: Path, **settings: Any) -> GenerationEngine:
    return open_engine("transformers", spec(folder, **settings))


def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generated(model: Any, prompt: list[int], **settings: Any) -> list[list[int]]:
    """What transformers generates after a prompt: a list for each returned sequence, padding removed."""
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]), **{"do_sample": False, "eos_token_id": 2, "pad_token_id": 0, **settings}
        )
    return [row[: row.index(2) + 1] if 2 in row else row for row in ids[:, len(prompt) :].tolist()]
