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
    """Write a BERT or XLM-RoBERTa as llama.cpp's converter does, with matrices of type ``kind``."""
    config = network.config
    shift = config.pad_token_id + 1 if config.model_type == "xlm-roberta" else 0
    writer = gguf.GGUFWriter(path, "bert")
    values = {
        "bert.vocab_size": config.vocab_size, "bert.context_length": config.max_position_embeddings - shift,
        "bert.embedding_length": config.hidden_size, "bert.feed_forward_length": config.intermediate_size,
        "bert.block_count": config.num_hidden_layers, "bert.attention.head_count": config.num_attention_heads,
        "bert.attention.layer_norm_epsilon": config.layer_norm_eps, "bert.attention.causal": False,
        "bert.pooling_type": pooling, **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
        **(metadata or {}),
    }  # fmt: skip
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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, network.config.num_hidden_layers)
    tensors = {}
    for name, weight in network.state_dict().items():
        own = name.removeprefix("bert.").removeprefix("roberta.")
        if own.startswith("pooler.") or own.endswith(("position_ids", "token_type_ids")):
            continue
        values = weight.float().numpy()[shift if own.startswith("embeddings.position") else 0 :]
        theirs = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        tensors[theirs] = np.ascontiguousarray(values)
    return tensors


def dequantised(path: Path, network: Any) -> Any:
    """Give ``network``, of which ``path`` was written, the weights of the file; returns it."""
    import torch

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, network.config.num_hidden_layers)
    stored = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    for name, parameter in network.named_parameters():
        own = name.removeprefix("bert.").removeprefix("roberta.")
        theirs = names.get_name(own, try_suffixes=(".weight", ".bias"))
        if theirs in stored and not own.startswith("embeddings.position"):
            parameter.data = torch.tensor(stored[theirs].reshape(parameter.shape))
    return network
