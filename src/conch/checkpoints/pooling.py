"""Pools token vectors to one vector per text, as configured by the modules of sentence-transformers.

Source: sentence-transformers' ``modules.json`` and the ``config.json`` of each module. Runs in workers; reads the
weights of ``Dense`` modules with safetensors, or with torch if they are pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from conch.checkpoints.activations import activation_named
from conch.checkpoints.folder import Checkpoint
from conch.core.errors import invalid, unsupported
from conch.machine import extras

#: Pooling modes by their key in a Pooling module's config.json; several modes are concatenated in this order.
KEYS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
MODES: Final = frozenset(KEYS.values())
#: Names of the hidden size in config.json.
SIZES: Final = ("hidden_size", "d_model", "dim", "n_embd")

Array = npt.NDArray[Any]
Step = Callable[[Array], Array]


@dataclass(slots=True)
class PoolingPlan:
    """The pooling modes, steps and dimension of a checkpoint, determined without reading weights."""

    modes: tuple[str, ...] = ("mean",)
    #: The steps after pooling: ``Dense`` with its folder, ``Normalize``, or ``Truncate`` with its dimension.
    steps: list[tuple[str, str]] = field(default_factory=list)
    #: The dimension of the result; -1 if unknown.
    dimension: int = -1
    #: Whether pooling includes the tokens of a prompt.
    include_prompt: bool = True
    #: Whether the checkpoint has sentence-transformers modules.
    modules: bool = False

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> PoolingPlan:
        """Read the plan of a checkpoint; the options ``pooling`` and ``normalize`` override it.

        Without modules the plan is mean pooling without normalisation. Raises INVALID_ARG or UNSUPPORTED, naming the
        module.
        """
        plan = cls()
        hidden = next((checkpoint.config[key] for key in SIZES if isinstance(checkpoint.config.get(key), int)), -1)
        for module in checkpoint.modules():
            plan.modules = True
            plan._add(checkpoint, str(module.get("type", "")).rpartition(".")[2], str(module.get("path", "")))
        # As in sentence-transformers: truncate after all modules, and normalise again only if ``normalize`` is set.
        truncated = _truncate_dim(checkpoint) if plan.modules else 0
        if truncated:
            plan.steps.append(("Truncate", str(truncated)))
        if checkpoint.options.pooling:
            plan.modes = (_mode(checkpoint.options.pooling),)
        if checkpoint.options.normalize is not None:
            plan.steps = [step for step in plan.steps if step[0] != "Normalize"]
            if checkpoint.options.normalize:
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
    """Computes text vectors from token vectors: a plan with its weights."""

    def __init__(self, plan: PoolingPlan, checkpoint: Checkpoint) -> None:
        self.modes = plan.modes
        self.steps = [_step(checkpoint, kind, value) for kind, value in plan.steps]
        #: The number of leading elements of a vector that are kept, None for all.
        self.kept = next((int(value) for kind, value in plan.steps if kind == "Truncate"), None)

    def __call__(self, hidden: Array, mask: Array | None) -> Array:
        """Pool FP32 ``[n, length, size]`` to ``[n, dimension]``.

        INT64 ``mask`` ``[n, length]`` is 0 for excluded tokens; None includes all tokens.
        """
        vectors = [_pool(mode, hidden, mask) for mode in self.modes]
        return self.finish(vectors[0] if len(vectors) == 1 else np.concatenate(vectors, 1))

    def finish(self, vectors: Array) -> Array:
        """Apply the steps after pooling, from ``[n, size]`` to ``[n, dimension]``."""
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
    """Return the checkpoint's ``truncate_dim``, 0 without one. Raises INVALID_ARG unless it is a positive integer."""
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
    # Not matmul, because its library starts threads that compete with those of the engine.
    return np.asarray(np.einsum("nl,nld->nd", weights, hidden))


def normalized(vectors: Array) -> Array:
    """Scale vectors to length 1; zero vectors stay zero."""
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    return np.asarray(vectors / np.maximum(lengths, np.float32(1e-12))[:, None])


def dense(checkpoint: Checkpoint, path: str) -> Step:
    """Load a ``Dense`` module: a linear layer with an activation."""
    config = _config(checkpoint, path)
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = activation_named(name, checkpoint.source)
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
    """Return a copy of ``mask`` that excludes the first ``skip`` tokens of each row."""
    kept = mask.copy()
    for row, count in enumerate(skip):
        kept[row, :count] = 0
    return kept
