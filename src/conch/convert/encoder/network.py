"""The network of a checkpoint in torch: what it takes and gives, and inputs to try conversions with.

It is the reference that every file made from it is compared with, in fp32 and on the CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from conch.backends.native.arrays import Array
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.convert.libraries import quiet, reason
from conch.errors import internal, invalid, unsupported

#: The class of transformers that gives a task's network, for the tasks that one pass of an encoder answers.
HEADS: Final[dict[str, str]] = {
    "feature-extraction": "AutoModel",
    "sentence-similarity": "AutoModel",
    "text-classification": "AutoModelForSequenceClassification",
    "zero-shot-classification": "AutoModelForSequenceClassification",
    "text-ranking": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "fill-mask": "AutoModelForMaskedLM",
    "image-classification": "AutoModelForImageClassification",
}

#: What a head gives, as transformers calls it.
OUTPUTS: Final[dict[str, tuple[str, ...]]] = {
    "AutoModel": ("last_hidden_state",),
    "AutoModelForQuestionAnswering": ("start_logits", "end_logits"),
}
LOGITS: Final = ("logits",)

#: Sequences and tokens of the inputs that a conversion is tried with: other sizes than those it was traced with,
#: one token, one sequence; ragged ones are padded.
TRIALS: Final = ((2, 9), (1, 1), (1, 16), (5, 33))


def head_of(task: str) -> str:
    """The head for ``task``; UNSUPPORTED for a task that one pass of an encoder does not answer."""
    try:
        return HEADS[task]
    except KeyError:
        raise unsupported(
            f"task '{task}' cannot be converted: conversion is for {', '.join(sorted([*HEADS, 'text-generation']))}; "
            "serve the checkpoint itself instead"
        ) from None


@dataclass(frozen=True)
class ReferenceNetwork:
    """A module of transformers with the names of its inputs and outputs, and its input sizes.

    ``run`` takes INT64 ``[sequences, tokens]`` (FP32 ``[images, channels, height, width]`` for ``pixel_values``)
    and gives FP32.
    """

    module: Any
    head: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    longest: int
    image: tuple[int, int, int]

    @property
    def model_type(self) -> str:
        return str(self.module.config.model_type)

    @property
    def gives_tokens(self) -> bool:
        """Whether the outputs have an axis of tokens, and not only one of sequences."""
        return self.head not in ("AutoModelForSequenceClassification", "AutoModelForImageClassification")

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs by name."""
        import torch

        with torch.inference_mode(), quiet():
            given = {name: torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in self.inputs}
            answer = self.module(**given, return_dict=True)
            return {name: answer[name].float().numpy() for name in self.outputs}

    def example(self, sequences: int, tokens: int, seed: int = 0) -> dict[str, Array]:
        """Inputs of random tokens (or pixels), with padding after all sequences but the first."""
        draw = np.random.default_rng(seed)
        if self.inputs == ("pixel_values",):
            return {"pixel_values": draw.standard_normal((sequences, *self.image), np.float32)}
        config = self.module.config
        pad = config.pad_token_id if config.pad_token_id is not None else 0
        ids = draw.integers(0, config.vocab_size, (sequences, tokens))
        # A pad token inside a text would shift the positions of those models that count from it.
        ids[ids == pad] = pad + 1 if pad + 1 < config.vocab_size else 0
        lengths = np.maximum(1, tokens - np.arange(sequences) * 2)
        mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
        arrays = {
            "input_ids": np.where(mask == 1, ids, pad),
            "attention_mask": mask,
            "token_type_ids": ((np.arange(tokens) > tokens // 2) * mask),
        }
        return {name: arrays[name] for name in self.inputs}

    def trials(self) -> Iterator[dict[str, Array]]:
        """Inputs of several sizes, to compare a converted network with this one."""
        for seed, (sequences, tokens) in enumerate(TRIALS):
            yield self.example(sequences, min(tokens, self.longest), seed)


def load(checkpoint: Checkpoint, options: Options) -> ReferenceNetwork:
    """The checkpoint's network on the CPU, in fp32 and with plain attention, which exporters and optimisers know."""
    head = head_of(checkpoint.task)
    try:
        import torch
        import transformers
    except ImportError:
        raise unsupported('converting needs torch and transformers: pip install "conch[convert]"') from None
    try:
        with quiet():
            module = getattr(transformers, head).from_pretrained(
                checkpoint.directory,
                attn_implementation="eager",
                dtype=torch.float32,
                trust_remote_code=options.trust_remote_code,
                local_files_only=True,
            )
    except Exception as error:  # transformers passes on whatever its readers of weights raise
        raise invalid(f"'{checkpoint.source}' cannot be loaded as {head}: {reason(error)}") from None
    module.eval()
    # Key-value caches are outputs that nobody wants.
    module.config.use_cache = False
    return ReferenceNetwork(
        module,
        head,
        inputs_of(module),
        OUTPUTS.get(head, LOGITS),
        min(checkpoint.max_length, 512),
        image_of(checkpoint),
    )


def inputs_of(module: Any) -> tuple[str, ...]:
    """What the network takes of what a tokenizer or an image processor gives."""
    takes = inspect.signature(module.forward).parameters
    if "input_ids" not in takes:
        if "pixel_values" in takes:
            return ("pixel_values",)
        raise internal(f"{type(module).__name__} takes neither input_ids nor pixel_values")
    names = [name for name in ("input_ids", "attention_mask") if name in takes]
    # One kind of segment (roberta) or none (deberta-v2) is no input, although the argument exists.
    if "token_type_ids" in takes and getattr(module.config, "type_vocab_size", 2) > 1:
        names.append("token_type_ids")
    return tuple(names)


def image_of(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Channels, height and width that the checkpoint's image processor gives."""
    processor = checkpoint.json("preprocessor_config.json") or {}
    size: Any = processor.get("size") or checkpoint.config.get("image_size") or 224
    if processor.get("do_center_crop") and processor.get("crop_size"):
        size = processor["crop_size"]
    if isinstance(size, dict):
        edge = size.get("shortest_edge", 224)
        size = (size.get("height", edge), size.get("width", edge))
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(checkpoint.config.get("num_channels", 3)), int(height), int(width)
