"""What libraries say, made fit for an error of ours.  Runs in workers and in ``conch convert``."""

from __future__ import annotations

import re
from typing import Final

#: What follows a sentence: advice on how to call transformers, or all the names that it knows.
_SENTENCE_END: Final = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def one_line(error: BaseException) -> str:
    """The first sentence of a library's message, on one line; its type when it has none."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return _SENTENCE_END.split(paragraph, 1)[0].rstrip(".")[:500] or type(error).__name__
