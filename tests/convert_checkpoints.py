"""Tiny encoders with random weights and no tokenizer, for tests of ``conch.convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

from conch.backends.huggingface.checkpoint import Checkpoint
from conch.backends.huggingface.options import Options
from conch.convert.network import HEADS

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "pad_token_id": 0,
}


def encoder(folder: Path, architecture: type[PreTrainedConfig], task: str, **settings: Any) -> Checkpoint:
    """A checkpoint of ``architecture`` with the head of ``task``, written to ``folder``."""
    torch.manual_seed(7)
    config = architecture(**{**SIZES, **settings})
    model = getattr(modeling_auto, HEADS[task]).from_config(config)
    # Weights as large as trained ones, so that a wrong mask or position shows.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return Checkpoint(folder, str(folder), "", config.to_dict(), Options(), task=task, max_length=64)
