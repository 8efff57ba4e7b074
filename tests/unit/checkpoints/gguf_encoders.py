"""Encoders of transformers as GGUF files: embedding models and rerankers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from tests.unit.checkpoints.gguf_files import MEAN

CONTROL: Final = 3
_NORMAL, _UNKNOWN = 1, 2
#: llama.cpp's architecture by transformers' type of a model with rotary positions; others are a ``bert``.
_ROTARY: Final = {"nomic_bert": "nomic-bert", "jina_embeddings_v3": "jina-bert-v3"}
#: llama.cpp's names of layers of these models by transformers' names.
_LAYERS: Final = {
    "embeddings.word_embeddings": "token_embd", "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
    "post_attention_layernorm": "attn_output_norm", "post_mlp_layernorm": "layer_output_norm",
}  # fmt: skip


def wordpieces(vocabulary: Sequence[str]) -> dict[str, Any]:
    """Return the metadata of a WordPiece tokenizer; ``vocabulary`` is in BERT's spelling."""
    special = [token.startswith("[") and token.endswith("]") for token in vocabulary]
    tokens = [
        token if whole else token[2:] if token.startswith("##") else f"▁{token}"
        for token, whole in zip(vocabulary, special, strict=True)
    ]
    ids = {"bos": "[CLS]", "cls": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]"}
    return {
        "model": "bert", "pre": "default", "tokens": tokens, "token_type_count": 2,
        "token_type": [CONTROL if whole else _NORMAL for whole in special],
        **{f"{role}_token_id": vocabulary.index(token) for role, token in ids.items()},
    }  # fmt: skip


def unigrams(pieces: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Return the metadata of XLM-RoBERTa's tokenizer; ``pieces`` follow ``<s>``, ``<pad>``, ``</s>`` and ``<unk>``."""
    return {
        "model": "t5", "pre": "default", "tokens": ["<s>", "<pad>", "</s>", "<unk>", *(text for text, _ in pieces)],
        "scores": [0.0, 0.0, 0.0, 0.0, *(score for _, score in pieces)], "token_type_count": 1,
        "token_type": [CONTROL, CONTROL, CONTROL, _UNKNOWN, *[_NORMAL] * len(pieces)],
        "add_space_prefix": True, "remove_extra_whitespaces": True, "add_bos_token": True, "add_eos_token": True,
        "add_sep_token": True, "bos_token_id": 0, "padding_token_id": 1, "eos_token_id": 2, "seperator_token_id": 2,
        "unknown_token_id": 3,
    }  # fmt: skip


def write_encoder(
    path: Path,
    network: Any,
    tokenizer: Mapping[str, Any],
    pooling: int = MEAN,
    kind: str = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write an encoder as llama.cpp's converter does, with matrices of type ``kind``.

    It is a BERT, an XLM-RoBERTa, a NomicBERT or a model of Jina Embeddings v3.
    """
    config = network.config
    shift = config.pad_token_id + 1 if config.model_type == "xlm-roberta" else 0
    architecture = _ROTARY.get(config.model_type, "bert")
    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        "vocab_size": config.vocab_size, "context_length": config.max_position_embeddings - shift,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers, "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_epsilon": config.layer_norm_eps, "attention.causal": False, "pooling_type": pooling,
    }  # fmt: skip
    if architecture != "bert":
        keys["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    values = {
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
        **(metadata or {}),
    }
    for key, value in values.items():
        add = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
            list: writer.add_array,
        }[type(value)]  # fmt: skip
        add(key, value)
    for name, weights in _tensors(network, shift).items():
        if weights.ndim > 1 and not name.startswith(("token_types", "position_embd")):
            typed = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(weights, typed), raw_dtype=typed)
        else:
            writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(network: Any, shift: int) -> dict[str, Any]:
    tensors = {}
    for name, weight in network.state_dict().items():
        if "pooler." in name or name.endswith(("position_ids", "token_type_ids")):
            continue
        values = weight.float().numpy()[shift if "embeddings.position" in name else 0 :]
        tensors[_tensor_name(network, name)] = np.ascontiguousarray(values)
    if network.config.model_type in _ROTARY:
        for name in [name for name in tensors if ".attn_q." in name]:
            parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    return tensors


def _tensor_name(network: Any, name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    config = network.config
    if config.model_type in _ROTARY:
        layer, _, kind = name.rpartition(".")
        if layer in _LAYERS:
            return f"{_LAYERS[layer]}.{kind}"
        _, number, rest = layer.split(".", 2)
        return f"blk.{number}.{_LAYERS[rest]}.{kind}"
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    own = name.removeprefix("bert.").removeprefix("roberta.")
    theirs = names.get_name(own, try_suffixes=(".weight", ".bias"))
    assert theirs is not None, name
    return str(theirs)


def dequantised(path: Path, network: Any) -> Any:
    """Give ``network``, of which ``path`` was written, the weights of the file; returns it."""
    import torch

    stored = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    for name in [name for name in stored if ".attn_qkv." in name]:
        for part, values in zip("qkv", np.split(stored[name], 3), strict=True):
            stored[name.replace("qkv", part)] = values
    for name, parameter in network.named_parameters():
        if "pooler." not in name and "embeddings.position" not in name:
            parameter.data = torch.tensor(stored[_tensor_name(network, name)].reshape(parameter.shape))
    return network


#: The sizes of small encoders, and their vocabulary.
SIZES: Final[dict[str, Any]] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 128, "initializer_range": 0.3, "type_vocab_size": 2,
}  # fmt: skip
PIECES: Final = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"word{number}" for number in range(92))]


def write_model(path: Path, family: str, kind: str = "F32", **settings: Any) -> Any:
    """Write a small encoder; returns it with the weights of the file."""
    import torch
    import transformers

    torch.manual_seed(4)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    network = transformers.AutoModel.from_config(config).eval()
    for parameter in network.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape) * 0.2
    write_encoder(path, network, wordpieces(PIECES), kind=kind, **settings)
    return dequantised(path, network)
