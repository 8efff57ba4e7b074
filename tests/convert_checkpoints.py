"""For tests of ``conch.convert``: tiny encoders with random weights, tiny language models, and quick plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto

from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.convert.encoder.network import HEADS
from conch.convert.plan import Plan
from conch.convert.sentences import load
from tests.task_checkpoints import sound_file, tone

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


def quick_plan(model: Path, repository: Path, **given: Any) -> Plan:
    """A conversion of ``model`` to ``m`` on one core, with the time for measuring set to nothing."""
    usual: dict[str, Any] = {"name": "m", "seconds": 0, "threads": 1}
    return Plan(str(model), repository, **{**usual, **given})


def no_progress(step: str) -> None:
    pass


def causal(folder: Path, architecture: type[PreTrainedConfig], **settings: Any) -> Path:
    """A language model that has read a little, so that it is surer of some tokens than of others."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [sample.text for sample in load("text-generation")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=256)
    made.save_pretrained(folder)
    torch.manual_seed(7)
    sizes = {**SIZES, "vocab_size": 384, "hidden_size": 64, "max_position_embeddings": 256, "pad_token_id": 1}
    config = architecture(**{**sizes, "bos_token_id": 0, "eos_token_id": 1, **settings})
    model = AutoModelForCausalLM.from_config(config)
    _read(model, [token for text in texts for token in made(text).input_ids])
    model.save_pretrained(folder)
    return folder


def _read(model: Any, ids: list[int], steps: int = 60, rows: int = 8, tokens: int = 48) -> None:
    """Train on pieces of one text."""
    text, generator, threads = torch.tensor(ids), torch.Generator().manual_seed(7), torch.get_num_threads()
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - tokens, (rows,), generator=generator).tolist()
        batch = torch.stack([text[start : start + tokens] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    torch.set_num_threads(threads)


def spoken(folder: Path, texts: Sequence[str] = ()) -> Path:
    """Write tones of the lengths of ``texts``, by default three, and the file that lists them for ``--data``."""
    rows = []
    for index, text in enumerate(texts or ("", "", "")):
        (folder / f"{index}.wav").write_bytes(sound_file(tone(1.0 + 0.3 * index, seed=index)))
        rows.append(json.dumps({"audio": f"{index}.wav", **({"text": text} if text else {})}))
    (folder / "recordings.jsonl").write_text("\n".join(rows))
    return folder / "recordings.jsonl"
