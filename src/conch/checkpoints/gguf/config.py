"""Converts the metadata of a GGUF file to the content of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from conch.checkpoints.gguf.reader import GgufFile
from conch.core.errors import invalid

#: Names of architectures in transformers, ``model_type`` and the class of the language model, by llama.cpp's name.
_ARCHITECTURES: Final[Mapping[str, tuple[str, str]]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "falcon": ("falcon", "FalconForCausalLM"),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM"),
    "stablelm": ("stablelm", "StableLmForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "cohere": ("cohere", "CohereForCausalLM"),
    "command-r": ("cohere", "CohereForCausalLM"),
    "mamba": ("mamba", "MambaForCausalLM"),
}
_INTEGERS: Final[Mapping[str, str]] = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_NUMBERS: Final[Mapping[str, str]] = {
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}
_REQUIRED: Final = ("max_position_embeddings", "hidden_size", "num_hidden_layers")
_TOKENS: Final[Mapping[str, str]] = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the content of config.json for the model in a GGUF file.

    An unknown architecture keeps llama.cpp's name. Raises INVALID_ARG for a file without a model or without required
    metadata.
    """
    name = file.text("general.architecture")
    if not name:
        raise invalid(f"{file.path} holds no model: general.architecture is missing")
    if file.text("general.type", "model") != "model":
        raise invalid(f"{file.path} holds no model but a '{file.text('general.type')}'")
    model_type, architecture = _ARCHITECTURES.get(name, (name, ""))
    config: dict[str, Any] = {"model_type": model_type, "architectures": [architecture] if architecture else []}
    for key, theirs in _INTEGERS.items():
        value = file.metadata.get(f"{name}.{theirs}")
        if value is None:
            continue
        if not isinstance(value, int):
            value = max(file.numbers(f"{name}.{theirs}"), default=0)  # one number per layer
        config[key] = int(value)
    for key, theirs in _NUMBERS.items():
        value = file.metadata.get(f"{name}.{theirs}")
        if isinstance(value, int | float):
            config[key] = float(value)
    for key in _REQUIRED:
        if config.get(key, 0) <= 0:
            raise invalid(f"{file.path}: {name}.{_INTEGERS[key]} is missing")
    config["vocab_size"] = len(file.texts("tokenizer.ggml.tokens")) or file.integer(f"{name}.vocab_size", 0)
    for key, theirs in _TOKENS.items():
        if (id := file.integer(f"tokenizer.ggml.{theirs}")) >= 0:
            config[key] = id
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    return config


def rope_scaling(file: GgufFile) -> tuple[str, float]:
    """Return the type of rotary frequency scaling (``none``, ``linear``, ``yarn``, ``longrope``) and its factor.

    Source of the defaults: llama.cpp's llama-model.cpp.
    """
    name = file.text("general.architecture")
    factor = file.number(f"{name}.rope.scaling.factor") or file.number(f"{name}.rope.scale_linear") or 1.0
    kind = file.text(f"{name}.rope.scaling.type", "linear")
    if any(tensor.startswith("rope_factors_") for tensor in file.tensors):
        kind = "longrope"
    return ("none", 1.0) if kind == "none" or (kind == "linear" and factor == 1) else (kind, factor)
