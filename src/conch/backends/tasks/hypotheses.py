"""The sentences of zero-shot classification, a template with each label put in, and what limits them.

Used by the tasks for text, images and sound as requests arrive.  What a client sends is multiplied here: every label
gets the whole template, and in text classification the whole text beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from conch.checkpoints.options import Options
from conch.errors import invalid

#: Default of the parameter ``max_candidate_labels``.
MAX_LABELS: Final = 1000
#: Characters of a template, and of all sentences of a request with the texts that they are about.
_MAX_TEMPLATE: Final = 1000
_MAX_CHARACTERS: Final = 64 << 20


def max_labels(options: Options) -> int:
    """The most labels that a row may have.  Raises INVALID_ARG for a limit of 0."""
    limit = options.integer("max_candidate_labels", MAX_LABELS)
    if not limit:
        raise invalid("parameter 'max_candidate_labels' is 0; it must be 1 at least")
    return limit


def check_labels(count: int, most: int) -> None:
    """Raise INVALID_ARG for more than ``most`` labels in a row."""
    if count > most:
        raise invalid(
            f"input 'candidate_labels' has {count} labels in a row; at most {most} are taken "
            "(parameter 'max_candidate_labels')"
        )


def hypotheses(template: str, labels: Sequence[str], texts: Iterable[str]) -> list[str]:
    """The sentence of each label; ``texts`` are what they are about, of which every label gets one.

    Raises INVALID_ARG for a template without its one place, and for more characters than can be meant.
    """
    check_template(template)
    characters = sum(map(len, labels)) + len(labels) * len(template) + sum(map(len, texts))
    if characters > _MAX_CHARACTERS:
        raise invalid(
            f"{len(labels)} candidate labels with their texts are {characters} characters; a request may have "
            f"{_MAX_CHARACTERS}: send fewer labels, or shorter texts"
        )
    # No formatting: a template may ask for what attributes hold, or for a width that fills the memory.
    return [template.replace("{}", label) for label in labels]


def check_template(template: Any, *, formatted: bool = False) -> None:
    """Raise INVALID_ARG for a template without its one place, ``{}``.

    With ``formatted``, for one that is given to ``str.format``, no other brace may be in it either.
    """
    if not isinstance(template, str) or template.count("{}") != 1 or len(template) > _MAX_TEMPLATE:
        raise invalid(
            f"hypothesis_template is '{str(template)[:100]}'; it must have one place for the label, written {{}}, "
            f"and at most {_MAX_TEMPLATE} characters"
        )
    if formatted and any(brace in template.replace("{}", "") for brace in "{}"):
        raise invalid(f"hypothesis_template is '{template[:100]}'; it must have no other braces than {{}}")
