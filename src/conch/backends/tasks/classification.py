"""Scores, ranked labels and the hypotheses of zero-shot classification, for all classification tasks.

A hypothesis is a template filled with a label. Hypotheses have limits, because a request multiplies its input: each
label has its own copy of the template and, in text classification, of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from conch.backends.base.arrays import Array, Strings
from conch.checkpoints.activations import sigmoid, softmax
from conch.checkpoints.options import Options
from conch.core.errors import ConchError, invalid

#: The input and parameter that selects one of ``FUNCTIONS``.
FUNCTION: Final = "function_to_apply"
FUNCTIONS: Final = ("sigmoid", "softmax", "none")


def apply(function: str, logits: Array) -> Array:
    """Apply one of ``FUNCTIONS`` to logits."""
    if function == "softmax":
        return softmax(logits)
    return sigmoid(logits) if function == "sigmoid" else logits


def checked_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return ``value`` of the input or parameter ``name``. Raises INVALID_ARG unless it is one of ``choices``."""
    if value not in choices:
        raise invalid(f"{name} is '{value}'; it must be one of {', '.join(choices)}")
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


def checked_top_k(value: Any, maximum: int) -> int:
    """Return ``top_k``, limited to ``maximum``. Raises INVALID_ARG unless it is a positive integer."""
    try:
        k = int(value)
    except (TypeError, ValueError):
        k = 0
    if k < 1:
        raise invalid(f"top_k is '{value}'; it must be at least 1")
    return min(k, maximum)


def mislabelled(score_count: int, named: int) -> ConchError:
    """Return the error for a network whose number of scores differs from the checkpoint's number of labels."""
    return invalid(
        f"the network returns {score_count} scores, but the checkpoint has {named} labels: correct id2label in "
        "config.json"
    )


#: Default of the parameter ``max_candidate_labels``.
MAX_LABELS: Final = 1000
#: The maximum number of characters in a template, and in all hypotheses of a request together with their texts.
_MAX_TEMPLATE: Final = 1000
_MAX_CHARACTERS: Final = 64 << 20


def max_labels(options: Options) -> int:
    """Return the maximum number of labels per row. Raises INVALID_ARG for a limit of 0."""
    return options.positive("max_candidate_labels", MAX_LABELS)


def check_labels(count: int, maximum: int) -> None:
    """Raise INVALID_ARG if a row has more than ``maximum`` labels."""
    if count > maximum:
        raise invalid(
            f"input 'candidate_labels' has {count} labels in a row; at most {maximum} are allowed "
            "(parameter 'max_candidate_labels')"
        )


def hypotheses(template: str, labels: Sequence[str], texts: Iterable[str]) -> list[str]:
    """Return the hypothesis of each label; ``texts`` has the text to classify for each label.

    Raises INVALID_ARG for a template without exactly one placeholder, and for too many characters in total.
    """
    check_template(template)
    characters = sum(map(len, labels)) + len(labels) * len(template) + sum(map(len, texts))
    if characters > _MAX_CHARACTERS:
        raise invalid(
            f"{len(labels)} candidate labels with their texts are {characters} characters; a request may have "
            f"{_MAX_CHARACTERS}: send fewer labels, or shorter texts"
        )
    # Not str.format: a template could read attributes, or request a width that fills the memory.
    return [template.replace("{}", label) for label in labels]


def check_template(template: Any, *, formatted: bool = False) -> None:
    """Raise INVALID_ARG for a template without exactly one placeholder, ``{}``.

    With ``formatted``, for templates that are passed to ``str.format``, other braces are invalid too.
    """
    if not isinstance(template, str) or template.count("{}") != 1 or len(template) > _MAX_TEMPLATE:
        raise invalid(
            f"hypothesis_template is '{str(template)[:100]}'; it must have one placeholder for the label, {{}}, "
            f"and at most {_MAX_TEMPLATE} characters"
        )
    if formatted and any(brace in template.replace("{}", "") for brace in "{}"):
        raise invalid(f"hypothesis_template is '{template[:100]}'; it must have no other braces than {{}}")
