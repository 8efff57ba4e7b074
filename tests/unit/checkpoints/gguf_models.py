"""Small models of transformers with random weights, and the same as GGUF files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
import transformers

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS: Final = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
#: By name: llama.cpp's architecture, transformers' class of configurations, and what differs.
MODELS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "llama": ("llama", "LlamaConfig", {}),
    "tied": ("llama", "LlamaConfig", {"tie_word_embeddings": True}),
    "mixtral": ("llama", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": (
        "granite", "GraniteConfig",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "smollm3": ("smollm3", "SmolLM3Config", {}),
    "qwen2": ("qwen2", "Qwen2Config", {}),
    "qwen2moe": ("qwen2moe", "Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3": ("qwen3", "Qwen3Config", {"head_dim": 16}),
    "qwen3moe": ("qwen3moe", "Qwen3MoeConfig", {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "phi3": ("phi3", "Phi3Config", {}),
    "olmo2": ("olmo2", "Olmo2Config", {}),
    "gemma": ("gemma", "GemmaConfig", {"head_dim": 16}),
    "gemma2": (
        "gemma2", "Gemma2Config",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": (
        "gemma3", "Gemma3TextConfig", {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    ),
}  # fmt: skip
#: The same of architectures that conch's reference does not compute.
OTHERS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    # transformers takes the size of its vocabulary from the tokenizer, and has this one without.
    "starcoder2": ("starcoder2", "Starcoder2Config", {"vocab_size": 49152}),
    "qwen2vl": ("qwen2vl", "Qwen2Config", {}),
}
#: The same of embedding models.
EMBEDDERS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "eurobert": ("eurobert", "EuroBertConfig", {}),
    "modernbert": (
        "modern-bert", "ModernBertConfig",
        {"num_hidden_layers": 5, "num_key_value_heads": 4, "local_rope_theta": 3000.0},
    ),
    "gemma_embedding": (
        "gemma-embedding", "Gemma3TextConfig",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 7, "use_bidirectional_attention": True},
    ),
}  # fmt: skip
_ALL: Final = {**MODELS, **OTHERS, **EMBEDDERS}
_NEIGHBOURS: Final = ("llama", "granite", "smollm3")


def model(name: str, **settings: Any) -> Any:
    _, configuration, differing = _ALL[name]
    torch.manual_seed(3)
    config = getattr(transformers, configuration)(**{**_SIZES, **differing, **settings})
    kind = transformers.AutoModel if name in EMBEDDERS else transformers.AutoModelForCausalLM
    built = kind.from_config(config)
    for parameter in built.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape) * 0.2
    return built.eval()


def write(
    path: Path,
    name: str,
    model: Any,
    quantised: str = "",
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model as llama.cpp's converter does, with ``metadata`` and ``tensors`` replaced or added.

    Matrices are of type ``quantised``, if that is given.
    """
    architecture = _ALL[name][0]
    values = {f"{architecture}.{key}": value for key, value in _metadata(model.config).items()}
    values |= {"general.file_type": 1, **(metadata or {})}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", architecture))
    for key, value in values.items():
        add = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
            list: writer.add_array,
        }[type(value)]  # fmt: skip
        add(key, value)
    for key, weights in (dict(_tensors(architecture, model)) | dict(tensors or {})).items():
        if quantised and weights.ndim > 1:
            kind = gguf.GGMLQuantizationType[quantised]
            writer.add_tensor(key, gguf.quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: Any) -> dict[str, Any]:
    names = {
        "vocab_size": "vocab_size", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim", "attention.value_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.layer_norm_epsilon": "norm_epsilon",
        "attention.sliding_window": "sliding_window",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
        "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    }  # fmt: skip
    values = {key: getattr(config, theirs, None) for key, theirs in names.items()}
    values["expert_count"] = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    rope = config.rope_parameters
    values["rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    if "sliding_attention" in rope:
        values["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if config.model_type == "modernbert":
        values |= {"attention.layer_norm_epsilon": config.norm_eps, "attention.sliding_window": config.local_attention}
        values |= {"attention.causal": False, "attention.sliding_window_pattern": 3}
    return {key: value for key, value in values.items() if value is not None}


def _tensors(architecture: str, model: Any) -> Iterator[tuple[str, Any]]:
    config = model.config
    names = gguf.get_tensor_name_map(
        next(id for id, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    for name, weight in model.state_dict().items():
        values = weight.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            block = f"blk.{name.split('.')[2]}."
            for part, half in zip(("gate", "up"), np.split(values, 2, 1), strict=True):
                yield f"{block}ffn_{part}_exps.weight", np.ascontiguousarray(half)
            continue
        if name.endswith("experts.down_proj"):
            yield f"blk.{name.split('.')[2]}.ffn_down_exps.weight", values
            continue
        if architecture in _NEIGHBOURS and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and "norm" in name:
            values = values + 1
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        suffixes = (".weight", ".bias")
        theirs = names.get_name(name, suffixes) or names.get_name(f"model.{name}", suffixes)
        assert theirs is not None, name
        yield theirs, np.ascontiguousarray(values)
