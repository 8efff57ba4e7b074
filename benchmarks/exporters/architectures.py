"""Tiny checkpoints with random weights, one for each architecture that exporters are compared on.

Used by benchmarks.exporters in its process. A name is a ``model_type`` of transformers, with an optional variant after
a colon, as in ``mistral:window``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

Settings = dict[str, Any]

SIZES: Final[Settings] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Families of RoBERTa: tokens have one type, and positions begin after that of padding.
ROBERTA: Final[Settings] = {"pad_token_id": 1, "type_vocab_size": 1}
NARROW: Final[Settings] = {"embedding_size": 16}
GROUPED: Final[Settings] = {"num_key_value_heads": 2, "head_dim": 8}
#: The window (tokens) of windowed layers; the compared texts are longer.
WINDOW: Final[Settings] = {**GROUPED, "sliding_window": 8}
ALTERNATING: Final[Settings] = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: Final[Settings] = {
    **GROUPED,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT: Final[Settings] = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
#: Other positions for texts longer than the original length, such as the compared texts. That length takes effect only
#: next to ``rope_parameters``, not inside them.
LONG_ROPE: Final[Settings] = {
    **GROUPED,
    "sliding_window": None,
    "original_max_position_embeddings": 20,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
}
DISENTANGLED: Final[Settings] = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": 32,
}
STAGES: Final[Settings] = {
    "depths": [1, 1],
    "num_heads": [2, 4],
    "embed_dim": 16,
    "window_size": 4,
    "hidden_sizes": [8, 16],
}
IMAGE: Final[Settings] = {"image_size": 32, "patch_size": 4, "num_labels": 5}

ENCODERS: Final[dict[str, Settings]] = {
    "bert": {}, "roberta": ROBERTA, "distilbert": {"hidden_dim": 64}, "albert": NARROW,
    "electra": NARROW, "mpnet": {"pad_token_id": 1}, "deberta": DISENTANGLED,
    "deberta-v2": {**DISENTANGLED, "position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    "xlm-roberta": ROBERTA, "camembert": ROBERTA, "xlm-roberta-xl": ROBERTA,
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "num_hidden_layers": 3},
    "nomic_bert": {}, "eurobert": GROUPED, "neobert": {}, "jina_embeddings_v3": {},
    "roberta-prelayernorm": ROBERTA, "data2vec-text": ROBERTA, "ernie": {},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "squeezebert": {"embedding_size": 32}, "roformer": NARROW, "convbert": {"embedding_size": 32, "head_ratio": 2},
    "megatron-bert": {}, "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "ibert": ROBERTA, "esm": {"pad_token_id": 1, "position_embedding_type": "rotary", "mask_token_id": 3},
    "flaubert": {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": 99, "pad_index": 0},
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_words": 99, "pad_index": 0},
    "nystromformer": {"num_landmarks": 8, "segment_means_seq_len": 64}, "fnet": {}, "splinter": {},
    "big_bird": {"attention_type": "original_full"}, "layoutlm": {}, "lilt": ROBERTA,
    "xmod": {"pad_token_id": 1, "default_language": "en_XX"}, "longformer": {"attention_window": 8, "pad_token_id": 1},
    "funnel": {"block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64},
    "luke": {"entity_vocab_size": 9, "pad_token_id": 1}, "canine": {"num_hash_buckets": 32}, "yoso": {},
    "vit": IMAGE, "deit": IMAGE, "beit": IMAGE, "dinov2": IMAGE, "swin": {**IMAGE, **STAGES},
    "convnext": {**IMAGE, "hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]},
    "resnet": {**IMAGE, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
}  # fmt: skip

CAUSAL: Final[dict[str, Settings]] = {
    "llama": GROUPED, "qwen2": GROUPED, "qwen3": GROUPED, "gpt2": {}, "gpt_neox": {}, "falcon": {"alibi": False},
    "falcon:alibi": {"alibi": True}, "persimmon": {}, "mistral": {**GROUPED, "sliding_window": None},
    "mistral:window": WINDOW, "phi": {}, "phi3": {**GROUPED, "sliding_window": None}, "phi3:window": WINDOW,
    "phi3:longrope": LONG_ROPE,
    "gemma": GROUPED, "gemma2": {**ALTERNATING, "query_pre_attn_scalar": 8},
    "gemma3_text": {**ALTERNATING, "query_pre_attn_scalar": 8}, "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {}, "mpt": {}, "starcoder2": {**GROUPED, "sliding_window": None}, "starcoder2:window": WINDOW,
    "olmo": {}, "olmo2": {}, "olmo3": ALTERNATING, "stablelm": GROUPED, "granite": GROUPED, "cohere": GROUPED,
    "cohere2": ALTERNATING, "codegen": {"rotary_dim": 4}, "gptj": {"rotary_dim": 4}, "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8}, "xglm": {"ffn_dim": 64},
    "biogpt": {}, "glm": {**GROUPED, "partial_rotary_factor": 0.5}, "glm4": {**GROUPED, "partial_rotary_factor": 0.5},
    "smollm3": GROUPED, "nemotron": GROUPED, "exaone4": ALTERNATING, "helium": GROUPED, "ernie4_5": GROUPED,
    "hunyuan_v1_dense": GROUPED, "seed_oss": GROUPED, "arcee": GROUPED, "apertus": GROUPED,
    "mixtral": {**EXPERTS, "sliding_window": None}, "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS, "olmoe": EXPERTS, "granitemoe": EXPERTS, "phimoe": {**EXPERTS, "sliding_window": None},
    "gpt_oss": {**EXPERTS, **ALTERNATING}, "deepseek_v3": LATENT, "mamba": {"state_size": 8},
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"]},
}  # fmt: skip

#: A llama with 135 million parameters (the sizes of SmolLM-135M), for measuring speed.
LLAMA_135M: Final[Settings] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def write(folder: Path, name: str, head: str, settings: Settings, spread: float = 0.2) -> Any:
    """Write a checkpoint for ``head`` (a class of transformers) to ``folder`` and return its module.

    Weights are as large as trained ones, so that a wrong mask or position shows. Raises KeyError for an architecture
    that the installed transformers does not have.
    """
    import torch
    import transformers

    torch.manual_seed(7)
    architecture = transformers.CONFIG_MAPPING[name.partition(":")[0]]
    module: Any = getattr(transformers, head).from_config(architecture(**settings)).eval()
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, spread)
            elif key.endswith("bias"):
                parameter.normal_(0, spread / 2)
    module.save_pretrained(folder)
    return module
