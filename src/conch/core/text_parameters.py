"""The request parameters of models that encode texts, for front ends, the table of backends, and tasks."""

from __future__ import annotations

from typing import Final

#: A text that is put before each text.
PROMPT_TEXT: Final = "prompt"
#: The side on which long texts are truncated, ``left`` or ``right``, or ``REFUSE``.
TRUNCATION: Final = "truncation"
REFUSE: Final = "refuse"
#: The maximum number of tokens of a text, and of a document, such as the second text of a pair.
MAX_LENGTH: Final = "max_length"
MAX_PAIR_TOKENS: Final = "max_pair_tokens"
#: Whether ``tokens`` has the special tokens, and whether the text of token ids has them.
ADD_SPECIAL_TOKENS: Final = "add_special_tokens"
SKIP_SPECIAL_TOKENS: Final = "skip_special_tokens"

NAMES: Final = frozenset(
    {PROMPT_TEXT, TRUNCATION, MAX_LENGTH, MAX_PAIR_TOKENS, ADD_SPECIAL_TOKENS, SKIP_SPECIAL_TOKENS}
)
