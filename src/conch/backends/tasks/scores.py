"""Converts logits to scores and ranks labels, for classification tasks; runs in the threads of the instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array, Strings
from conch.core.errors import ConchError, invalid

#: The input and parameter that selects one of ``FUNCTIONS``.
FUNCTION: Final = "function_to_apply"
FUNCTIONS: Final = ("sigmoid", "softmax", "none")


def softmax(logits: Array) -> Array:
    """Return probabilities over the last dimension."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    powers /= powers.sum(-1, keepdims=True)
    return np.asarray(powers)


def sigmoid(logits: Array) -> Array:
    """Return the independent probability of each logit."""
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-logits)))


def apply(function: str, logits: Array) -> Array:
    """Apply one of ``FUNCTIONS`` to logits."""
    if function == "softmax":
        return softmax(logits)
    return sigmoid(logits) if function == "sigmoid" else logits


def checked_function(value: Any) -> str:
    """Return ``value``. Raises INVALID_ARG unless it is one of ``FUNCTIONS``."""
    if value not in FUNCTIONS:
        raise invalid(f"{FUNCTION} is '{value}'; it must be one of {', '.join(FUNCTIONS)}")
    return str(value)


def default_function(config: dict[str, Any], classes: int) -> str:
    """Return the function that transformers applies, by ``problem_type`` and the number of classes."""
    problem = config.get("problem_type")
    if problem == "regression":
        return "none"
    if problem == "multi_label_classification" or classes == 1:
        return "sigmoid"
    return "softmax"


def ranked(scores: Array) -> tuple[Array, Array]:
    """Return the class indices of each row of ``[rows, classes]``, best first, and their scores; the sort is stable."""
    order = np.argsort(-scores, axis=1, kind="stable")
    return order, scores[np.arange(len(scores))[:, None], order]


def best_first(labels: Sequence[str], scores: Array, k: int | None) -> tuple[Strings, Array]:
    """Return the ``k`` best labels of each row (None: all) and their FP32 scores, both ``[rows, k]``."""
    order, best = ranked(scores)
    chosen = order[:, :k]
    return Strings(chosen.shape, [labels[index] for index in chosen.ravel().tolist()]), best[:, :k]


def checked_top_k(value: Any, most: int) -> int:
    """Return ``top_k``, limited to ``most``. Raises INVALID_ARG unless it is a positive integer."""
    try:
        k = int(value)
    except (TypeError, ValueError):
        k = 0
    if k < 1:
        raise invalid(f"top_k is '{value}'; it must be at least 1")
    return min(k, most)


def mislabelled(score_count: int, named: int) -> ConchError:
    """Return the error for a network whose number of scores differs from the checkpoint's number of labels."""
    return invalid(
        f"the network gives {score_count} scores but the checkpoint has {named} labels: correct id2label in config.json"
    )
