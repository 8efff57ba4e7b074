"""Scores from logits, and labels best first; used by every task that classifies, in the threads of the instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array, Strings
from conch.errors import ConchError, invalid

#: The option that chooses one of ``FUNCTIONS``.
FUNCTION: Final = "function_to_apply"
FUNCTIONS: Final = ("sigmoid", "softmax", "none")


def softmax(logits: Array) -> Array:
    """Probabilities over the last dimension."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    powers /= powers.sum(-1, keepdims=True)
    return np.asarray(powers)


def sigmoid(logits: Array) -> Array:
    """The probability of each logit by itself."""
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-logits)))


def apply(function: str, logits: Array) -> Array:
    """Scores by one of ``FUNCTIONS``."""
    if function == "softmax":
        return softmax(logits)
    return sigmoid(logits) if function == "sigmoid" else logits


def checked_function(value: Any) -> str:
    """``value`` if it is one of ``FUNCTIONS``.  Raises INVALID_ARG for anything else."""
    if value not in FUNCTIONS:
        raise invalid(f"{FUNCTION} is '{value}'; it must be one of {', '.join(FUNCTIONS)}")
    return str(value)


def default_function(config: dict[str, Any], classes: int) -> str:
    """What transformers applies to a sequence classifier's logits by its ``problem_type`` and number of classes."""
    problem = config.get("problem_type")
    if problem == "regression":
        return "none"
    if problem == "multi_label_classification" or classes == 1:
        return "sigmoid"
    return "softmax"


def ranked(scores: Array) -> tuple[Array, Array]:
    """The classes of each row of ``[rows, classes]``, best first (ties in their order), and their scores."""
    order = np.argsort(-scores, axis=1, kind="stable")
    return order, scores[np.arange(len(scores))[:, None], order]


def best_first(labels: Sequence[str], scores: Array, k: int | None) -> tuple[Strings, Array]:
    """The ``k`` best labels of each row (None: all) and their FP32 scores, both ``[rows, k]``."""
    order, best = ranked(scores)
    chosen = order[:, :k]
    return Strings(chosen.shape, [labels[index] for index in chosen.ravel().tolist()]), best[:, :k]


def checked_top_k(value: Any, most: int) -> int:
    """``top_k`` as a client or a configuration gave it, at most ``most``.  Raises INVALID_ARG unless it is positive."""
    try:
        k = int(value)
    except (TypeError, ValueError):
        k = 0
    if k < 1:
        raise invalid(f"top_k is '{value}'; it must be at least 1")
    return min(k, most)


def mislabelled(given: int, named: int) -> ConchError:
    """The error for a network with another number of scores than the checkpoint has labels."""
    return invalid(
        f"the network gives {given} scores but the checkpoint has {named} labels: correct id2label in config.json"
    )
