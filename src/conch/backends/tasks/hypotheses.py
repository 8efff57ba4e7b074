"""Hypotheses of zero-shot classification (a template filled with each label) and their limits.

Used by the tasks for text, images and audio, on the thread that receives a request. The limits exist because a request
multiplies its input: each label has its own copy of the template and, in text classification, of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from conch.checkpoints.options import Options
from conch.core.errors import invalid

#: Default of the parameter ``max_candidate_labels``.
MAX_LABELS: Final = 1000
#: The maximum number of characters in a template, and in all hypotheses of a request together with their texts.
_MAX_TEMPLATE: Final = 1000
_MAX_CHARACTERS: Final = 64 << 20


def max_labels(options: Options) -> int:
    """Return the maximum number of labels per row. Raises INVALID_ARG for a limit of 0."""
    limit = options.integer("max_candidate_labels", MAX_LABELS)
    if not limit:
        raise invalid("parameter 'max_candidate_labels' is 0; it must be 1 at least")
    return limit


def check_labels(count: int, most: int) -> None:
    """Raise INVALID_ARG if a row has more than ``most`` labels."""
    if count > most:
        raise invalid(
            f"input 'candidate_labels' has {count} labels in a row; at most {most} are taken "
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
            f"hypothesis_template is '{str(template)[:100]}'; it must have one place for the label, written {{}}, "
            f"and at most {_MAX_TEMPLATE} characters"
        )
    if formatted and any(brace in template.replace("{}", "") for brace in "{}"):
        raise invalid(f"hypothesis_template is '{template[:100]}'; it must have no other braces than {{}}")
