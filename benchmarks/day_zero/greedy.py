"""Greedy completions by ``generate`` of transformers, for each prompt alone, with the logits of each token."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Generated(NamedTuple):
    """A prompt's token IDs, the start of the completion in the decoder's sequence, its tokens, and their logits."""

    prompt: list[int]
    begin: int
    tokens: list[int]
    logits: list[Any]


def generated(folder: Path, head: str, prompts: Iterable[str], tokens: int) -> list[Generated]:
    """Generate at most ``tokens`` new tokens for each of ``prompts``, in FP32, with transformers' class ``head``."""
    import torch
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = getattr(transformers, head).from_pretrained(folder, dtype=torch.float32).eval()
    completions = []
    for text in prompts:
        prompt = tokenizer(text)["input_ids"]
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, num_beams=1,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        begin = output.sequences.shape[1] - len(output.logits)
        completions.append(
            Generated(prompt, begin, output.sequences[0, begin:].tolist(), [row[0] for row in output.logits])
        )
    return completions
