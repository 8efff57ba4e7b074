"""Computes the size of a token in the KV cache from a network's configuration. Used by engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def token_bytes(config: Mapping[str, Any], value_bytes: int) -> int:
    """Return the size of a token's keys and values in all layers (bytes), with ``value_bytes`` per number.

    ``config`` is that of a text model. Without ``num_key_value_heads``, as many key heads as query heads are assumed.
    """
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    hidden = int(config.get("hidden_size") or config.get("n_embd") or heads)
    size = int(config.get("head_dim") or hidden // heads)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 1)
    return layers * int(config.get("num_key_value_heads") or heads) * size * 2 * value_bytes
