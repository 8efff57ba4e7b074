"""Tiny rerankers over causal language models, which sentence-transformers saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Gemma2Config, GPT2Config, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config
from transformers.models.auto import modeling_auto

from tests.text_checkpoints import TEXTS

CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "<|end|>Is it relevant?<|answer|>"
)
STRUCTURED = CHAT.replace("message.content", "message.content[0].text")
SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    *(f"<|{name}|>" for name in ("system", "query", "document", "end", "answer")),
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
QWEN3 = Qwen3Config(**SIZES, head_dim=8)
FAMILIES: dict[str, Any] = {
    "qwen3": QWEN3,
    "llama": LlamaConfig(**SIZES),
    # Absolute positions, and sliding windows that are shorter than the texts.
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=16),
}


def tokenizer(folder: Path, template: str | None, length: int = 256) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with tokens for ``yes`` and ``no``, written to ``folder``."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*TEXTS, *["yes", "no"] * 50], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>", model_max_length=length)
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def language_model(
    folder: Path, template: str | None = CHAT, config: Any = QWEN3, length: int = 256
) -> PreTrainedTokenizerFast:
    """A tiny causal language model in ``folder``; returns its tokenizer."""
    made = tokenizer(folder, template, length)
    config.vocab_size, config.pad_token_id, config.bos_token_id, config.eos_token_id = len(made), 0, None, 2
    torch.manual_seed(11)
    modeling_auto.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return made


def logit_scorer(
    folder: Path,
    template: str | None = CHAT,
    config: Any = QWEN3,
    false: bool = True,
    length: int = 256,
    **settings: Any,
) -> Path:
    """A reranker of sentence-transformers over a causal language model."""
    made = language_model(folder / "bare", template, config, length)
    inputs = settings.pop("transformer", {})
    transformer = Transformer(str(folder / "bare"), transformer_task="text-generation", **inputs)
    yes, no = made.convert_tokens_to_ids(["yes", "no"])
    modules = [transformer, LogitScore(yes, no if false else None)]
    CrossEncoder(modules=modules, device="cpu", **settings).save(str(folder / "saved"))
    return folder / "saved"
