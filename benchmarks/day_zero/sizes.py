"""Shrinks a configuration of transformers: widths, depths, heads, experts and vocabularies, by attribute names.

Pure functions over configuration classes; ``checkpoints.py`` calls them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

#: The size of every vocabulary, greater than those of the tokenizers in ``tokenizer.py``.
VOCABULARY: Final = 320
#: The maximum length of a text, greater than a prompt with its completion here.
POSITIONS: Final = 128
HEADS: Final = 4

#: Numbers by name. The first pattern that matches a whole name decides; smaller numbers do not change.
#: Heads times their size make the hidden size, heads of a state space times their size twice that.
_RULES: Final[tuple[tuple[str, int], ...]] = (
    (r"(.+_)?vocab_size(_per_layer_input)?|n_words", VOCABULARY),
    (
        r"max_(.+_)?position_embeddings|n_positions|n_ctx|max_seq_len|max_source_positions|max_target_positions",
        POSITIONS,
    ),
    (r"num_(key_value|kv)_heads|num_key_value_groups|kv_n_heads|swa_num_key_value_heads|linear_num_key_heads", 2),
    (r"(n_mamba|mamba_n|mamba_num)_heads", 8),
    (r"(.+_)?num_(attention_)?heads|n_heads?|(.+_)?attention_heads|linear_num_value_heads|index_n_heads", HEADS),
    (r"qk_head_dim", 16),
    (r"(.+_)?head_dim|d_kv|d_head|mamba_d_head|dim_head|kv_channels|rotary_dim", 8),
    (r"(.+_)?lora_rank|mamba_dt_rank|time_step_rank|laurel_rank|hc_lowrank", 16),
    (r"hidden_size_per_layer_input|query_pre_attn_scalar", 8),
    (r".*(intermediate|ffn|inner|feed_?forward|mlp).*_(size|dim)(_mlp)?|(n|d)_inner|d_ff|dff|ffn_dim|dim_ff", 64),
    (
        r"((.+_)?hidden_size(_.+)?|d_model|n_embd|dim|(.+_)?emb(ed|edding)?_(dim|size)|hidden_dim|word_embed_proj_dim)",
        32,
    ),
    (r"(.+_)?num_(local_|routed_)?experts|n_routed_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k", 2),
    (r"n_groups?|num_expert_group|topk_group|mamba_n_groups", 1),
    (r"(attn|expert)_layer_period|(en|de)coder_sparse_step", 2),
    (r"(attn|expert)_layer_offset|num_kv_shared_layers|num_nextn_predict_layers|first_k_dense_replace", 1),
    (r"num_dense_layers|moe_layer_start_index|moe_layer_end_index", 1),
    (r"(ssm_|mamba_d_)?state(_size)?", 8),
    (r"mamba_d_ssm", 64),
    (r"sliding_window(_size)?|attention_window|local_attention|attention_chunk_size|keep_window_size", 8),
    (r"(.+_)?chunk_size|expert_capacity|block_size", 16),
    (r"num_conv_pos_embedding_groups|num_groups", HEADS),
    (r"num_conv_pos_embeddings", 16),
    (r"(.+_)?(projection|proj|pooler|head|output)_(size|dim)|projection_dim", 32),
    (r"index_topk(_blocks)?|index_block_size", 8),
    (r"num_hash_buckets|ngram_vocab_size_base|encoder_hash_byte_group_vocab", 64),
)
_COMPILED: Final = tuple((re.compile(pattern), value) for pattern, value in _RULES)
_LAYERS: Final = re.compile(
    r"(.+_)?num_(hidden_|encoder_|decoder_|global_)?layers|(.+_)?n_layers?|(en|de)coder_layers|num_blocks|num_layers_per_stack"
)
#: Numbers of key and value heads, and of the query heads that share them.
_SHARED: Final = {
    "num_key_value_heads": ("num_attention_heads",),
    "swa_num_key_value_heads": ("swa_num_attention_heads",),
    "linear_num_key_heads": ("linear_num_value_heads",),
}
#: Numbers that are None in some default configurations, from which no network can be created.
_FILLED: Final = frozenset({
    "head_dim", "num_key_value_heads", "vocab_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
})  # fmt: skip
#: Maximum number of kinds of layers to keep.
_MOST_LAYERS: Final = 6
#: Exceptions to the rules, by ``model_type``.
_ADDED: Final[Mapping[str, Mapping[str, Any]]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48},
    "mobilebert": {"intra_bottleneck_size": 32},
    "canine": {"downsampling_rate": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "neomme": {"head_dim": 16},
    "reformer": {
        **{"attn_layers": ["local", "lsh"], "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [8, 24]},
        **{"hash_seed": 0, "num_buckets": 4, "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8},
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xlstm": {"num_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba": {
        **{"attention_hidden_size": 64, "attention_head_dim": 16},
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
}


def shrink(architecture: Any, *, filled: bool = False) -> Any:
    """Return a small configuration for the class ``architecture``; ``filled`` replaces numbers that default to None."""
    default = architecture()
    values = default.to_dict()
    small, layers = _layers(values)
    for name, value in values.items():
        if name in small or isinstance(value, bool):
            continue
        if isinstance(value, int):
            small[name] = _number(name, value, values, layers)
        elif value is None and filled and name in _FILLED:
            small[name] = 1 if name == "n_shared_experts" else _small(name)
        elif isinstance(value, list):
            small[name] = _list(name, value)
        elif isinstance(value, dict) and name in getattr(architecture, "sub_configs", {}):
            small[name] = shrink(type(getattr(default, name)), filled=filled)
    return architecture(
        **{name: value for name, value in small.items() if value != values[name]} | _added(architecture)
    )


def _added(architecture: Any) -> dict[str, Any]:
    return dict(_ADDED.get(architecture.model_type, {}))


def _number(name: str, value: int, values: Mapping[str, Any], layers: int) -> int:
    if _LAYERS.fullmatch(name):
        return min(value, layers)
    if any(values.get(other) == value for other in _SHARED.get(name, ())):
        return min(value, HEADS)
    small = _small(name)
    return value if small is None else min(value, small)


def _small(name: str) -> int | None:
    return next((small for pattern, small in _COMPILED if pattern.fullmatch(name)), None)


def _list(name: str, value: list[Any]) -> list[Any]:
    """Return the depths and heads of stages, as small as their widths allow."""
    if name == "depths":
        return [1] * len(value)
    if name == "num_heads" and value[0] == 3:
        return [heads * 2 // 3 for heads in value]
    return value


def _layers(values: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Cut the per-layer lists of a configuration to one layer of each kind; also returns the number of layers."""
    count = values.get("num_hidden_layers")
    count = count if isinstance(count, int) else 0
    lists = {
        name: value
        for name, value in values.items()
        if isinstance(value, list) and len(value) == count and count > 2 and not name.endswith("_sizes")
    }
    single = {int(index): own for index, own in (values.get("per_layer_config") or {}).items()}
    if not lists and not single:
        return {}, 2
    kinds: dict[str, int] = {}
    for index in range(count):
        kinds.setdefault(repr([value[index] for value in lists.values()] + [single.get(index)]), index)
    chosen = sorted(kinds.values())[:_MOST_LAYERS]
    # A single layer would not show the effect of a cache on the next layer.
    chosen = chosen * 2 if len(chosen) == 1 else chosen
    cut: dict[str, Any] = {name: [value[index] for index in chosen] for name, value in lists.items()}
    if single:
        cut["per_layer_config"] = {
            new: {name: _scaled(name, value, values) for name, value in single[old].items()}
            for new, old in enumerate(chosen)
            if old in single
        }
    return cut, len(chosen)


def _scaled(name: str, value: Any, values: Mapping[str, Any]) -> Any:
    """Scale a layer's own number in proportion to the common one."""
    common = values.get(name)
    if type(value) is not int or type(common) is not int:
        return value
    return max(1, _number(name, common, values, 0) * value // common)
