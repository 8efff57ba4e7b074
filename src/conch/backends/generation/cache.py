"""How many bytes a token takes in a KV cache, from the configuration of its network.  Used by engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def token_bytes(config: Mapping[str, Any], value_bytes: int) -> int:
    """The keys and values of a token in all layers, of ``value_bytes`` each.

    Assumes as many key heads as query heads where ``config`` (of a text model) does not say.
    """
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    hidden = int(config.get("hidden_size") or config.get("n_embd") or heads)
    size = int(config.get("head_dim") or hidden // heads)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 1)
    return layers * int(config.get("num_key_value_heads") or heads) * size * 2 * value_bytes
