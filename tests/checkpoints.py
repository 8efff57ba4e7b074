"""Tiny checkpoints with random weights, under the names of the real ones, so that models load without a network.

``python -m tests.checkpoints DIR`` writes them in the layout of the Hugging Face Hub's cache; with ``HF_HUB_CACHE=DIR``
and ``HF_HUB_OFFLINE=1`` the names resolve as if the models had been downloaded.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    FalconConfig,
    GenerationConfig,
    LlamaConfig,
    PersimmonConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

END: Final = "<|endoftext|>"
TEXT: Final = """I am going to the market in the morning. How can you be sure that the station is open?
Where is the nearest library? The nearest one is near the station. You can walk there, or take a bus.
A program takes a list of numbers and returns the even ones. I am working on it with a friend."""

#: The real model's id, and the configuration of its small relative.
ARCHITECTURES: Final[dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]]] = {
    "tiiuae/falcon-7b": (FalconConfig, {}),
    "adept/persimmon-8b-base": (PersimmonConfig, {"intermediate_size": 64}),
    "meta-llama/Llama-2-7b-hf": (LlamaConfig, {"intermediate_size": 64}),
    "huggyllama/llama-7b": (LlamaConfig, {"intermediate_size": 64}),
    "Qwen/Qwen2-1.5B-Instruct": (Qwen2Config, {"intermediate_size": 64, "num_key_value_heads": 2}),
}


def hub_cache(target: Path) -> Path:
    """Write every checkpoint of ``ARCHITECTURES`` into ``target``, a cache folder of the Hub."""
    tokenizer = train_tokenizer()
    for seed, (name, (architecture, sizes)) in enumerate(ARCHITECTURES.items()):
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), architecture, sizes, tokenizer, seed)
            add_to_cache(target, name, Path(folder))
    return target


def train_tokenizer(*, every_byte: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that knows the words of ``TEXT``; with ``every_byte`` it can write any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400 if every_byte else 200,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if every_byte else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    # Rows of a batch must end where generation starts, so they are padded on the left.
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, padding_side="left")


def write_checkpoint(
    folder: Path,
    architecture: type[PreTrainedConfig],
    sizes: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
) -> None:
    """Random weights from ``seed``, configuration and tokenizer, as ``save_pretrained`` writes them."""
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": 0.5,
    }
    config = architecture(**settings | sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    # A text-generation pipeline samples unless the checkpoint says otherwise.
    model.generation_config = GenerationConfig(do_sample=False, bos_token_id=0, eos_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_adapter(checkpoint: Path, folder: Path, seed: int, *, rank: int = 4) -> None:
    """A LoRA adapter of the attention of ``checkpoint`` with random weights from ``seed``, as peft writes it."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            tensors[f"{layer}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.5
            tensors[f"{layer}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.5
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8, "lora_dropout": 0.0}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "bias": "none", "target_modules": ["q_proj", "v_proj"]})
    )
    save_file(tensors, folder / "adapter_model.safetensors")


def add_to_cache(cache: Path, name: str, folder: Path) -> None:
    """Store ``folder`` as the main revision of the repository ``name``."""
    repository = cache / f"models--{name.replace('/', '--')}"
    revision = hashlib.sha1(name.encode()).hexdigest()
    snapshot = repository / "snapshots" / revision
    for part in ("blobs", "refs"):
        (repository / part).mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    for file in (path for path in folder.rglob("*") if path.is_file()):
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blob)
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)


if __name__ == "__main__":
    hub_cache(Path(sys.argv[1]))
