"""The network of a checkpoint in torch, fp32, on the CPU: its inputs and outputs, and test inputs.

It is the reference for all files made from it. ONNX graphs are verified against it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array
from conch.backends.tasks.causal import CAUSAL_HEAD
from conch.backends.tasks.engines import PIXELS, POOLED
from conch.backends.tasks.retrieval.pipeline import head_of_module, output_of
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.modules import FEATURES, EmbeddingModel, Module
from conch.checkpoints.task import CONTRASTIVE
from conch.checkpoints.tokenizers.inputs import open_encoder
from conch.checkpoints.tokenizers.open import original_tokenizer
from conch.convert.encoder.modules import contained, outputs_of, with_modules
from conch.convert.libraries import load_pretrained, silence_libraries
from conch.core.errors import internal, unsupported

#: The class of transformers for the network of each task that an encoder completes in one pass.
HEADS: Final[dict[str, str]] = {
    "feature-extraction": "AutoModel",
    "sentence-similarity": "AutoModel",
    "text-classification": "AutoModelForSequenceClassification",
    "zero-shot-classification": "AutoModelForSequenceClassification",
    "text-ranking": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "fill-mask": "AutoModelForMaskedLM",
}

#: The outputs of a head, by transformers' names.
OUTPUTS: Final[dict[str, tuple[str, ...]]] = {
    "AutoModel": ("last_hidden_state",),
    "AutoModelForQuestionAnswering": ("start_logits", "end_logits"),
}
LOGITS: Final = ("logits",)

#: Sequences and tokens of test inputs, different from those of the trace, including one token and one sequence; shorter
#: sequences are padded.
TEST_SHAPES: Final = ((2, 9), (1, 1), (1, 16), (5, 33))
#: The maximum length of test inputs (tokens); longer ones reveal no more errors.
MAX_TEST_TOKENS: Final = 512


def head_of(checkpoint: Checkpoint) -> str:
    """Return the head for the task of ``checkpoint``; raises UNSUPPORTED unless one pass completes it."""
    try:
        return HEADS[checkpoint.task]
    except KeyError:
        advice = "serve the checkpoint itself instead"
        if checkpoint.config.get("model_type") in CONTRASTIVE:
            advice = "--task feature-extraction converts it as a model that embeds texts and images"
        raise unsupported(
            f"task '{checkpoint.task}' cannot be converted: conversion is for "
            f"{', '.join(sorted([*HEADS, 'text-generation']))}; {advice}"
        ) from None


@dataclass(frozen=True)
class ReferenceNetwork:
    """A module of transformers with the names of its inputs and outputs, and the maximum length of test inputs.

    ``run`` takes INT64 ``[sequences, tokens]`` and returns FP32.
    """

    module: Any
    head: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_tokens: int

    @property
    def model_type(self) -> str:
        return str(self.module.config.model_type)

    def has_tokens(self, name: str) -> bool:
        """Whether an input or output has a token axis in addition to the sequence axis."""
        by_text = name in (POOLED, FEATURES) or self.head in ("AutoModelForSequenceClassification", CAUSAL_HEAD)
        return name in self.inputs or not by_text

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name."""
        import torch

        with torch.inference_mode(), silence_libraries():
            tensors = {name: torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in self.inputs}
            outputs = self.module(**tensors, return_dict=True)
            return {name: outputs[name].float().numpy() for name in self.outputs}

    def example(self, sequences: int, tokens: int, seed: int = 0) -> dict[str, Array]:
        """Return inputs of random tokens, with padding in all sequences but the first."""
        tokens = min(tokens, self.max_tokens)
        draw = np.random.default_rng(seed)
        config = self.module.config
        pad = config.pad_token_id if config.pad_token_id is not None else 0
        ids = draw.integers(0, config.vocab_size, (sequences, tokens))
        # A pad token inside a text would shift the positions in models that count from it.
        ids[ids == pad] = pad + 1 if pad + 1 < config.vocab_size else 0
        lengths = np.maximum(1, tokens - np.arange(sequences) * 2)
        mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
        arrays = {
            "input_ids": np.where(mask == 1, ids, pad),
            "attention_mask": mask,
            "token_type_ids": ((np.arange(tokens) > tokens // 2) * mask),
        }
        return {name: arrays[name] for name in self.inputs}

    def tests(self) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
        """Yield inputs of several sizes with this network's outputs, for comparing a converted network."""
        for seed, (sequences, tokens) in enumerate(TEST_SHAPES):
            arrays = self.example(sequences, tokens, seed)
            yield arrays, self.run(arrays)


@dataclass(frozen=True)
class ImageNetwork(ReferenceNetwork):
    """A network for images, whose pixels have the ``shape`` ``[channels, height, width]``; sequences are images."""

    shape: tuple[int, ...] = ()

    def has_tokens(self, name: str) -> bool:
        return False

    def example(self, sequences: int, tokens: int, seed: int = 0) -> dict[str, Array]:
        """Return random pixels."""
        return {PIXELS: np.random.default_rng(seed).standard_normal((sequences, *self.shape), np.float32)}


def load(checkpoint: Checkpoint) -> ReferenceNetwork:
    """Load the checkpoint's network with the eager attention that exporters and optimizers recognize."""
    head = head_of(checkpoint)
    outputs = OUTPUTS.get(head, LOGITS)
    module = load_pretrained(checkpoint, head, attention="eager", outputs=outputs)
    # Key-value caches would be useless outputs.
    module.config.use_cache = False
    max_tokens = min(checkpoint.max_length, MAX_TEST_TOKENS)
    encoder = open_encoder(checkpoint, original_tokenizer(checkpoint))
    inputs = inputs_of(module.forward, module.config, types=encoder.types)
    return ReferenceNetwork(module, head, inputs, outputs, max_tokens)


def load_embedding(
    checkpoint: Checkpoint, model: EmbeddingModel, first: Module, *, whole: bool, pixels: Array | None = None
) -> ReferenceNetwork:
    """Load the network of the Transformer module ``first``, with all modules after it if ``whole``.

    Otherwise, its outputs are those that the modules read. Of a network for texts and images, load the part for images
    if there are ``pixels`` of an image, FP32 ``[1, channels, height, width]``, else the part for texts.
    """
    part = checkpoint.part(first.path)
    head = head_of_module(part, first)
    output = output_of(first)
    settings: dict[str, Any] = {}
    reads_text, reads_image = first.methods or ("forward", "")
    if first.methods is not None:
        own = (reads_text, "text_config") if pixels is None else (reads_image, "vision_config")
        settings["part"] = partial(features_of, *own)
    if pixels is not None:
        import torch

        settings["example"] = {PIXELS: torch.from_numpy(pixels)}
    module = load_pretrained(part, head, attention="eager", outputs=(output,), **settings)
    if pixels is None:
        reads = module.forward if first.methods is None else getattr(module.network, reads_text)
        inputs = inputs_of(reads, module.config, types=open_encoder(part, original_tokenizer(part)).types)
    module.config.use_cache = False
    rest = contained(model, first)
    outputs: tuple[str, ...] = (output,)
    if whole and rest is not None:
        module, outputs = with_modules(module, checkpoint, part, model, first, rest), outputs_of(model, first)
    if pixels is not None:
        return ImageNetwork(module, head, (PIXELS,), outputs, 1, pixels.shape[1:])
    return ReferenceNetwork(module, head, inputs, outputs, min(part.max_length, MAX_TEST_TOKENS))


def features_of(method: str, config: str, network: Any) -> Any:
    """Return a ``torch.nn.Module`` of a ``method`` of ``network`` that embeds texts or images.

    ``config`` is the name of its part of the configuration.
    """
    import torch

    class FeatureNetwork(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network
            self.config = getattr(network.config, config)

        def forward(self, return_dict: bool = True, **arrays: Any) -> dict[str, Any]:
            return {FEATURES: getattr(self.network, method)(**arrays)[FEATURES]}

    return FeatureNetwork().eval()


def load_ranking(checkpoint: Checkpoint, ids: Sequence[int]) -> ReferenceNetwork:
    """Load a causal language model whose outputs are the logits of the tokens ``ids`` after the last token of a row."""
    module = load_pretrained(checkpoint, CAUSAL_HEAD, attention="eager", outputs=LOGITS)
    module.config.use_cache = False
    inputs = ("input_ids", "attention_mask")
    max_tokens = min(checkpoint.max_length, MAX_TEST_TOKENS)
    return ReferenceNetwork(_after_last_token(module, ids), CAUSAL_HEAD, inputs, LOGITS, max_tokens)


def _after_last_token(network: Any, ids: Sequence[int]) -> Any:
    """Return a ``torch.nn.Module`` of ``network`` that computes the logits of ``ids`` after the last token of a row."""
    import torch

    head = network.get_output_embeddings()

    class LastLogits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network
            self.config = network.config

        def forward(self, input_ids: Any, attention_mask: Any, return_dict: bool = True) -> dict[str, Any]:
            def last(states: Any) -> Any:
                ends = (attention_mask.sum(1) - 1).clamp(min=0)[:, None, None]
                return states.gather(1, ends.expand(-1, -1, states.shape[2]))

            # The head is a large part of the work, and is needed for one token of each row.
            hook = head.register_forward_pre_hook(lambda _, given: (last(given[0]), *given[1:]))
            try:
                outputs = self.network(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)
            finally:
                hook.remove()
            return {LOGITS[0]: outputs.logits[:, 0][:, list(ids)]}

    return LastLogits().eval()


def inputs_of(reads: Callable[..., Any], config: Any, *, types: bool) -> tuple[str, ...]:
    """Return the tokenizer's arrays that ``reads``, a method of a network, takes; ``types``: it returns token types."""
    parameters = inspect.signature(reads).parameters
    if "input_ids" not in parameters:
        raise internal(f"{reads.__qualname__} does not take input_ids")
    names = [name for name in ("input_ids", "attention_mask") if name in parameters]
    # With one segment type (roberta) or none (deberta-v2) it is not an input, although the argument exists.
    if types and "token_type_ids" in parameters and getattr(config, "type_vocab_size", 2) > 1:
        names.append("token_type_ids")
    return tuple(names)


#: The maximum difference of a graph with unchanged arithmetic, relative to the largest value (at least 1).
TOLERANCE: Final = 1e-3
#: Larger weights (bytes) are written to a file beside the graph, because a graph with weights cannot exceed 2 GiB.
MAX_BYTES: Final = 1_500_000_000


def open_session(path: Path) -> Any:
    """Open ``path`` in ONNX Runtime on the CPU, without log lines."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def run(loaded: Any, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Run a session once; returns the outputs by name."""
    names = [output.name for output in loaded.get_outputs()]
    feed = {tensor.name: arrays[tensor.name] for tensor in loaded.get_inputs()}
    return dict(zip(names, loaded.run(names, feed), strict=True))


def verify_graph(path: Path, network: ReferenceNetwork) -> None:
    """Compare ``path`` with the network at several sizes; raises INTERNAL if they disagree."""
    loaded = open_session(path)
    for arrays, expected in network.tests():
        compare(run(loaded, arrays), expected, arrays)


def compare(actual: Mapping[str, Array], expected: Mapping[str, Array], arrays: Mapping[str, Array]) -> None:
    """Raise INTERNAL if an output differs by more than ``TOLERANCE``, ignoring padding."""
    size = "x".join(map(str, next(iter(arrays.values())).shape))
    mask = arrays.get("attention_mask")
    for name, reference in expected.items():
        value = actual[name]
        if value.shape != reference.shape:
            raise internal(f"{name} has shape {list(value.shape)} instead of {list(reference.shape)} for input {size}")
        if mask is not None and reference.shape[:2] == mask.shape:
            value, reference = value[mask == 1], reference[mask == 1]
        difference = float(np.abs(value - reference).max())
        allowed = TOLERANCE * max(1.0, float(np.abs(reference).max()))
        # NaN must fail, too.
        if not difference <= allowed:
            raise internal(f"{name} differs from torch by {difference:.2g} for input {size}; {allowed:.2g} is allowed")


def write_graph(model: Any, path: Path) -> None:
    """Save an ``onnx.ModelProto``; large weights are written to ``<path>.data``."""
    import onnx

    with silence_libraries():
        large = model.ByteSize() > MAX_BYTES
        onnx.save_model(
            model, path, save_as_external_data=large, all_tensors_to_one_file=True, location=path.name + ".data"
        )


def is_large(path: Path) -> bool:
    """Return whether the weights of ``path`` are, or must be, stored in a separate file."""
    data = path.with_name(path.name + ".data")
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0) > MAX_BYTES
