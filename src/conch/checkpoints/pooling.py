"""From token vectors to one vector for a text, as the modules of sentence-transformers say.

Source: sentence-transformers' ``modules.json`` and the ``config.json`` of each module.  Runs in workers; reads the
weights of ``Dense`` modules with safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch import extras
from conch.checkpoints.folder import Checkpoint
from conch.checkpoints.options import Options
from conch.errors import invalid, unsupported

#: Modes by their key in a Pooling module's config.json; several are concatenated in this order.
KEYS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
MODES: Final = frozenset(KEYS.values())
#: Where a configuration of the hidden size may be.
SIZES: Final = ("hidden_size", "d_model", "dim", "n_embd")

Array = npt.NDArray[Any]
Step = Callable[[Array], Array]


@dataclass(slots=True)
class PoolingPlan:
    """What the modules say, before any weight is read: modes, steps, the dimension."""

    modes: tuple[str, ...] = ("mean",)
    #: Each step after pooling: ``Dense`` and its folder, ``Normalize``, ``Truncate`` and its dimension.
    steps: list[tuple[str, str]] = field(default_factory=list)
    #: Of the result; -1 when nothing says.
    dimension: int = -1
    #: Whether the tokens of a prompt count.
    include_prompt: bool = True
    #: Whether the checkpoint has modules at all.
    modules: bool = False

    @classmethod
    def read(cls, checkpoint: Checkpoint, options: Options) -> PoolingPlan:
        """The plan of a checkpoint, with the configuration's ``pooling`` and ``normalize`` put in.

        Mean without normalisation where there are no modules.  Raises INVALID_ARG or UNSUPPORTED, naming the module.
        """
        plan = cls()
        hidden = next((checkpoint.config[key] for key in SIZES if isinstance(checkpoint.config.get(key), int)), -1)
        for module in checkpoint.modules():
            plan.modules = True
            plan._add(checkpoint, str(module.get("type", "")).rpartition(".")[2], str(module.get("path", "")))
        # As sentence-transformers does: after all modules, and without normalising again unless that is asked for.
        truncated = _truncate_dim(checkpoint) if plan.modules else 0
        if truncated:
            plan.steps.append(("Truncate", str(truncated)))
        if options.pooling:
            plan.modes = (_mode(options.pooling),)
        if options.normalize is not None:
            plan.steps = [step for step in plan.steps if step[0] != "Normalize"]
            if options.normalize:
                plan.steps.append(("Normalize", ""))
        dense = [path for kind, path in plan.steps if kind == "Dense"]
        if dense:
            plan.dimension = int(_config(checkpoint, dense[-1]).get("out_features", -1))
        elif hidden > 0:
            plan.dimension = hidden * len(plan.modes)
        if truncated:
            plan.dimension = truncated if plan.dimension < 0 else min(plan.dimension, truncated)
        return plan

    def _add(self, checkpoint: Checkpoint, kind: str, path: str) -> None:
        if kind == "Pooling":
            config = _config(checkpoint, path)
            named = config.get("pooling_mode")
            if named is not None:
                names = [named] if isinstance(named, str) else list(named)
                self.modes = tuple(_mode(name) for name in names)
            else:
                self.modes = tuple(mode for key, mode in KEYS.items() if config.get(key)) or ("mean",)
            self.include_prompt = bool(config.get("include_prompt", True))
        elif kind in ("Dense", "Normalize"):
            self.steps.append((kind, path))
        elif kind not in ("Transformer", "Dropout"):
            raise unsupported(
                f"'{checkpoint.source}' has the sentence-transformers module '{kind}'; "
                "supported are Transformer, Pooling, Dense, Normalize and Dropout"
            )


class Pooling:
    """A plan with its weights: token vectors to text vectors."""

    def __init__(self, plan: PoolingPlan, checkpoint: Checkpoint) -> None:
        self.modes = plan.modes
        self.steps = [_step(checkpoint, kind, value) for kind, value in plan.steps]
        #: The first numbers of a vector that are kept, None for all.
        self.kept = next((int(value) for kind, value in plan.steps if kind == "Truncate"), None)

    def __call__(self, hidden: Array, mask: Array | None) -> Array:
        """FP32 ``[n, length, size]`` to ``[n, dimension]``; INT64 ``mask[n, length]`` has 0 for what does not count.

        No mask means that all tokens count.
        """
        vectors = [_pool(mode, hidden, mask) for mode in self.modes]
        return self.finish(vectors[0] if len(vectors) == 1 else np.concatenate(vectors, 1))

    def finish(self, vectors: Array) -> Array:
        """Apply the steps after pooling: ``[n, size]`` to ``[n, dimension]``."""
        for step in self.steps:
            vectors = step(vectors)
        return vectors


def _step(checkpoint: Checkpoint, kind: str, value: str) -> Step:
    if kind == "Normalize":
        return normalized
    if kind == "Truncate":
        size = int(value)
        return lambda vectors: vectors[:, :size]
    return dense(checkpoint, value)


def _truncate_dim(checkpoint: Checkpoint) -> int:
    """How many numbers of an embedding the checkpoint keeps, 0 for all.  Raises INVALID_ARG for what is no number."""
    size = (checkpoint.json("config_sentence_transformers.json") or {}).get("truncate_dim")
    if size is None:
        return 0
    if type(size) is not int or size < 1:
        raise invalid(
            f"'{checkpoint.source}' has the truncate_dim {size!r} in config_sentence_transformers.json; it must be a "
            "whole number of 1 or more"
        )
    return size


def _pool(mode: str, hidden: Array, mask: Array | None) -> Array:
    if mask is None:
        if mode == "mean":
            return np.asarray(np.add.reduce(hidden, 1) / np.float32(hidden.shape[1]))
        mask = np.ones(hidden.shape[:2], np.int64)
    if mode == "cls":
        return hidden[:, 0]
    if mode == "lasttoken":
        last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
        return np.asarray(hidden[np.arange(len(hidden)), last])
    if mode == "max":
        return np.asarray(np.where(mask[:, :, None] > 0, hidden, np.float32(-1e9)).max(1))
    weights = mask.astype(np.float32)
    if mode == "weightedmean":
        weights *= np.arange(1, mask.shape[1] + 1, dtype=np.float32)
    total = np.maximum(weights.sum(1, keepdims=True), np.float32(1e-9))
    weights /= np.sqrt(total) if mode == "mean_sqrt_len_tokens" else total
    # Not matmul, whose library keeps threads of its own busy beside those of the engine.
    return np.asarray(np.einsum("nl,nld->nd", weights, hidden))


def normalized(vectors: Array) -> Array:
    """Vectors of length 1; zero stays zero."""
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    return np.asarray(vectors / np.maximum(lengths, np.float32(1e-12))[:, None])


ACTIVATIONS: Final[dict[str, Step]] = {
    "Identity": lambda x: x,
    "Tanh": lambda x: np.asarray(np.tanh(x)),
    "ReLU": lambda x: np.asarray(np.maximum(x, 0)),
    "Sigmoid": lambda x: np.asarray(1 / (1 + np.exp(-x))),
}


def dense(checkpoint: Checkpoint, path: str) -> Step:
    """A ``Dense`` module: a linear layer and its activation."""
    config = _config(checkpoint, path)
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2].strip("'>")
    if name not in ACTIVATIONS:
        raise unsupported(
            f"'{checkpoint.source}': {path}/config.json has the activation '{name}'; "
            f"supported are {', '.join(ACTIVATIONS)}"
        )
    activation = ACTIVATIONS[name]
    weights = _weights(checkpoint, path)
    try:
        weight = np.ascontiguousarray(weights["linear.weight"].T, np.float32)
    except KeyError:
        raise invalid(f"'{checkpoint.source}': the weights in {path} have no linear.weight") from None
    bias = weights.get("linear.bias")
    shift = np.float32(0) if bias is None else bias.astype(np.float32)
    return lambda vectors: activation(vectors @ weight + shift)


def _weights(checkpoint: Checkpoint, path: str) -> dict[str, Array]:
    file = checkpoint.path(f"{path}/model.safetensors")
    if file is not None:
        extras.require(f"the Dense module of '{checkpoint.source}'", "safetensors", extra=checkpoint.extra)
        from safetensors.numpy import load_file

        return dict(load_file(str(file)))
    file = checkpoint.path(f"{path}/pytorch_model.bin")
    if file is None:
        raise invalid(f"'{checkpoint.source}' lacks {path}/model.safetensors, which modules.json names")
    extras.require(f"the Dense module of '{checkpoint.source}' in {path}/pytorch_model.bin", "torch")
    import torch

    return {name: tensor.float().numpy() for name, tensor in torch.load(file, weights_only=True).items()}


def _config(checkpoint: Checkpoint, path: str) -> dict[str, Any]:
    config = checkpoint.json(f"{path}/config.json")
    if config is None:
        raise invalid(f"'{checkpoint.source}' lacks {path}/config.json, which modules.json names")
    return config


def _mode(name: str) -> str:
    mode = "lasttoken" if name == "last" else name
    if mode not in MODES:
        raise invalid(f"pooling is '{name}'; it must be one of {', '.join(sorted(MODES | {'last'}))}")
    return mode


def masked(mask: Array, skip: Sequence[int]) -> Array:
    """``mask`` without the first ``skip`` tokens of each row."""
    kept = mask.copy()
    for row, count in enumerate(skip):
        kept[row, :count] = 0
    return kept
